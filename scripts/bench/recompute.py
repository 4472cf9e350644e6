"""Recompute on one device: autopar, AutoSAC and the partitioner of torch.compile at equal measured peak memory.

    python scripts/bench/recompute.py                  # blocks of GPT-2 and of Llama
    python scripts/bench/recompute.py llama --budgets 6

The other systems run at eleven settings of their own budgets; for each budget of measured peak bytes, the fastest of
their results that fits counts. autopar is given these bytes as its budget. Peak: bytes of live storages during a real
step on this CPU, measured in the same way for all. The cost of recompute is that of all ops of the step minus that of
the eager step, in FLOPs of products and in milliseconds, priced for all by autopar's CPU preset. The median CPU time of
interleaved steps stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from recompute_models import MODELS, Measured, example
from recompute_peers import sweep_autosac, sweep_partitioner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import Cluster, InfeasibleError, autoparallelize, plan
from autopar.report.tables import table
from autopar.sizes import show_bytes

Build = Callable[[], nn.Module]
SYSTEMS = ("autopar", "AutoSAC", "partitioner")


def ours(build: Build, budget: int) -> Measured | None:
    """Measure a step under the plan for this budget; None if there is no plan."""
    model, inputs = build(), {"x": example()}
    try:
        made = plan(model, inputs, Cluster.preset("cpu", (1,)), memory_budget=budget, optimizer="sgd")
    except InfeasibleError:
        return None
    return Measured(autoparallelize(model, inputs, init_device_mesh("cpu", (1,)), plan=made), model)


def within(results: Sequence[Measured], budget: int) -> Measured | None:
    """The result with the least recompute among those that fit the budget."""
    fits = [result for result in results if result.peak_bytes <= budget]
    return min(fits, key=lambda result: (result.seconds, result.peak_bytes), default=None)


def rows_of(name: str, count: int, steps: int) -> list[list[str]]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]().train()

    model = build()
    eager = Measured(model, model)
    peers = {"AutoSAC": list(sweep_autosac(build)), "partitioner": list(sweep_partitioner(build))}
    least = min(own.peak_bytes for results in peers.values() for own in results)
    budgets = [round(eager.peak_bytes + (least - eager.peak_bytes) * i / (count - 1)) for i in range(count)]
    chosen: list[dict[str, Measured | None]] = []
    for budget in budgets:
        own = ours(build, budget)
        # plans for larger budgets count too if they fit, as the other systems' settings do
        best = within([m for m in (own, *(row["autopar"] for row in chosen)) if m is not None], budget)
        chosen.append({"autopar": best, **{system: within(results, budget) for system, results in peers.items()}})
        print(*cells(name, show_bytes(budget), chosen[-1], eager), sep="  ", file=sys.stderr, flush=True)
    timed = {id(m): m for row in chosen for m in row.values() if m is not None}
    for _ in range(steps):
        for own in (eager, *timed.values()):
            own.time()
    lines = [cells(name, "eager", {"autopar": eager, "AutoSAC": eager, "partitioner": eager}, eager)]
    return lines + [cells(name, show_bytes(b), row, eager) for b, row in zip(budgets, chosen, strict=True)]


def cells(name: str, budget: str, row: dict[str, Measured | None], eager: Measured) -> list[str]:
    row_cells = [name, budget]
    for system in SYSTEMS:
        result = row[system]
        if result is None:
            row_cells += ["none", "", "", ""]
            continue
        further = (result.seconds - eager.seconds) * 1e3, (result.flops - eager.flops) / 1e9
        took = f"{1e3 * statistics.median(result.cpu_seconds):.0f}" if result.cpu_seconds else ""
        row_cells += [show_bytes(result.peak_bytes), f"{further[0]:.1f}", f"{further[1]:.2f}", took]
    return row_cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all without any")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    rows = [row for name in options.models or MODELS for row in rows_of(name, options.budgets, options.steps)]
    head = ["model", "budget"]
    for system in SYSTEMS:
        head += [system, "ms", "GFLOP", "CPU ms"]
    print(*table(rows, "<" + ">" * (len(head) - 1), head=head, indent=0), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
