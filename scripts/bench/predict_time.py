"""Predicted against measured seconds of a step: twelve (model, plan) pairs on two ranks of this machine.

    torchrun --standalone --nproc-per-node 2 scripts/bench/predict_time.py              # the table
    torchrun --standalone --nproc-per-node 2 scripts/bench/predict_time.py --clock wall

In each round, the ranks profile themselves as `autopar profile` does, and then run some steps of every pair in random
order. Plans are priced on a cluster with the medians of the profiles' figures, and compared with the medians of the
measured steps. Nothing is fitted to steps (forward, backward, fused AdamW, zero_grad).

x4: in four micro-batches; replay: with blocks recomputed; whole: every rank computes everything.

`--clock cpu` (default) uses CPU seconds of a rank, summed over its threads, for profiles and steps: on a machine whose
cores other programs use too, wall-clock seconds would depend on these. With cores of its own, a rank takes as long.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from step_cases import bert, gpt2, llama, vit
from timing_ranks import start_rank, timing_options
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import Cluster, autoparallelize
from autopar.errors import InfeasibleError
from autopar.planning.simulation import predicted_on
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.plans import Plan
from autopar.profiling.calibrate import Clock, measure_host
from autopar.report.tables import table
from autopar.stopwatch import Stopwatch

Batch = dict[str, torch.Tensor]
VOCABULARY = 4096


def tokens(rows: int, length: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def pixels(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.rand(rows, 3, 64, 64, generator=generator),
        "labels": torch.randint(0, 10, (rows,), generator=generator),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], int]] = {  # the int: sequences of a step
    "gpt2": (lambda: gpt2(4, 384, 6, VOCABULARY), lambda rows: tokens(rows, 128), 8),
    "llama": (lambda: llama(4, 384, 6, VOCABULARY), lambda rows: tokens(rows, 128), 8),
    "bert": (lambda: bert(4, 256, 4, VOCABULARY), lambda rows: tokens(rows, 128), 16),
    "vit": (lambda: vit(4, 256, 4, 64, 8, 10), pixels, 32),
}


@dataclass(frozen=True)
class Pair:
    """A model and the requirements of its plan; `tight`: with little more memory than the smallest budget."""

    model: str
    plan: str
    constraints: tuple[str, ...] = ()
    micro_batches: int = 1
    tight: bool = False


WHOLE = "input:* = R"
PAIRS = [
    Pair("gpt2", "ddp", ("ddp",)),
    Pair("gpt2", "fsdp", ("fsdp",)),
    Pair("gpt2", "tp", ("tp",)),
    Pair("gpt2", "fsdp x4", ("fsdp",), 4),
    Pair("gpt2", "tp x4", ("tp",), 4),
    Pair("gpt2", "ddp replay", ("ddp",), tight=True),
    Pair("gpt2", "whole", ("activation:* = R", WHOLE)),
    Pair("llama", "ddp", ("ddp",)),
    Pair("llama", "fsdp", ("fsdp",)),
    Pair("llama", "tp", ("tp",)),
    Pair("bert", "ddp", ("ddp",)),
    Pair("vit", "ddp", ("ddp",)),
]


class Trained:
    """A pair's model under its plan and, on rank 0, what is needed to price the plan."""

    def __init__(self, pair: Pair, cluster: Cluster) -> None:
        self.pair = pair
        build, batches, rows = MODELS[pair.model]
        torch.manual_seed(0)
        model = build().train()
        self.inputs = batches(rows // pair.micro_batches)
        self.prepared = _prepared(build, self.inputs, pair, cluster) if dist.get_rank() == 0 else None
        made = [_planned(self.prepared, pair) if self.prepared is not None else None]
        dist.broadcast_object_list(made)
        assert made[0] is not None
        self.plan: Plan = made[0]
        mesh = init_device_mesh("cpu", cluster.shape, mesh_dim_names=cluster.axis_names)
        self.model = autoparallelize(model, self.inputs, mesh, plan=self.plan)
        groups: dict[type, list[nn.Parameter]] = {}  # a fused call cannot mix DTensors and plain tensors
        for parameter in self.model.parameters():
            groups.setdefault(type(parameter.data), []).append(parameter)
        self.optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)

    def step(self) -> None:
        for _ in range(self.pair.micro_batches):
            self.model(**self.inputs).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, clock: Callable[[], float]) -> float:
        dist.barrier()
        start = clock()
        self.step()
        return clock() - start


def _prepared(build: Callable[[], nn.Module], inputs: Batch, pair: Pair, cluster: Cluster) -> Prepared:
    with torch.device("meta"):
        model = build().train()
    request = request_of(cluster, micro_batches=pair.micro_batches, constraints=pair.constraints)
    watch = Stopwatch()
    return prepare(model, trace_for(model, inputs, None, request, watch), request, watch)


def _planned(prepared: Prepared, pair: Pair) -> Plan:
    budget = 1 << 60
    if pair.tight:
        try:
            prepared.solve(memory_budget_bytes=1)
        except InfeasibleError as error:
            budget = int(1.02 * (error.smallest_budget_bytes or budget))
    return prepared.solve(memory_budget_bytes=budget)


def median_cluster(measured: Sequence[Cluster]) -> Cluster:
    """The cluster with the medians of each figure."""

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    devices = [one.device for one in measured]
    first = devices[0]
    device = replace(
        first,
        flops_per_s={name: middle([d.flops_per_s[name] for d in devices]) for name in first.flops_per_s},
        bytes_per_s=middle([d.bytes_per_s for d in devices]),
        launch_seconds=middle([d.launch_seconds for d in devices]),
        attention=middle([d.attention for d in devices]),
        update_bytes_per_s=middle([d.update_bytes_per_s or d.bytes_per_s for d in devices]),
        parameter_seconds=middle([d.parameter_seconds for d in devices]),
    )
    axes = tuple(
        replace(
            axis,
            latency_seconds=middle([one.axes[i].latency_seconds for one in measured]),
            launch_seconds=middle([one.axes[i].launch_seconds for one in measured]),
            bytes_per_s=middle([one.axes[i].bytes_per_s for one in measured]),
            all_to_all_bytes_per_s=middle([one.axes[i].all_to_all_bytes_per_s or 0.0 for one in measured]) or None,
            gather_bytes_per_s=middle([one.axes[i].gather_bytes_per_s or 0.0 for one in measured]) or None,
            scatter_bytes_per_s=middle([one.axes[i].scatter_bytes_per_s or 0.0 for one in measured]) or None,
        )
        for i, axis in enumerate(measured[0].axes)
    )
    return replace(measured[0], device=device, axes=axes)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's rank correlation: concordant less discordant, over the number of all pairs of pairs."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def told(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def show(trained: Sequence[Trained], taken: Sequence[Sequence[float]], cluster: Cluster, clock: Clock) -> None:
    lines, errors = [], []
    by_model: dict[str, list[tuple[float, float]]] = {}
    for model, times in zip(trained, taken, strict=True):
        assert model.prepared is not None
        prediction = predicted_on(model.prepared, model.plan, cluster)
        low, middle, high = statistics.quantiles(times, n=4)
        errors.append(prediction.step_seconds / middle - 1)
        by_model.setdefault(model.pair.model, []).append((prediction.step_seconds, middle))
        parts = [
            prediction.compute_seconds,
            prediction.comm_seconds,
            prediction.recompute_seconds,
            prediction.optimizer_seconds,
        ]
        lines.append(
            [model.pair.model, model.pair.plan, f"{1e3 * middle:.0f}", f"{1e3 * low:.0f} to {1e3 * high:.0f}"]
            + [f"{1e3 * prediction.step_seconds:.0f}", f"{100 * errors[-1]:+.1f} %"]
            + [f"{1e3 * part:.0f}" for part in parts]
        )
    sizes = [abs(error) for error in errors]
    tau = {name: kendall_tau(pairs) for name, pairs in by_model.items() if len(pairs) > 2}
    print(
        f"Clock: {clock} seconds. Median error {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.0f} %."
    )
    print(*(f"Kendall's tau over {len(by_model[n])} plans of {n}: {t:.2f}." for n, t in tau.items()), sep="\n")
    head = ["model", "plan", "measured ms", "quartiles", "predicted ms", "error"]
    head += ["compute", "collectives", "replays", "optimizer"]
    print("\n```", *table(lines, "<<>>>>>>>>", head=head, indent=0), "```", sep="\n")
    device, axis = cluster.device, cluster.axes[0]
    print(
        f"\nMedians of the profile: {device.flops_per_s['float32'] / 1e9:.0f} GFLOP/s float32, attention "
        f"{100 * device.attention:.0f} % of it, pointwise {device.bytes_per_s / 1e9:.2f} GB/s, optimizer "
        f"{(device.update_bytes_per_s or 0) / 1e9:.2f} GB/s, {1e6 * device.launch_seconds:.1f} µs an op, axis "
        f"{axis.bytes_per_s / 1e9:.2f} GB/s (all-gather {(axis.gather_bytes_per_s or 0) / 1e9:.2f}, reduce-scatter "
        f"{(axis.scatter_bytes_per_s or 0) / 1e9:.2f}) and {1e6 * axis.launch_seconds:.0f} µs a collective, "
        f"{1e6 * device.parameter_seconds:.0f} µs a parameter."
    )


def main() -> None:
    options = timing_options(__doc__).parse_args()
    start_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    clock = {"cpu": time.process_time, "wall": time.perf_counter}[options.clock]
    measured = [measure_host(mesh, seconds=options.profile_seconds, clock=options.clock)]
    trained = []
    for pair in PAIRS:
        trained.append(Trained(pair, measured[0]))
        trained[-1].step()
        told(f"{pair.model}, {pair.plan}: made")
    taken: list[list[float]] = [[] for _ in trained]
    chance = random.Random(0)
    for number in range(options.rounds):
        measured.append(measure_host(mesh, seconds=options.profile_seconds, clock=options.clock))
        order = list(range(len(trained)))
        chance.shuffle(order)
        for i in order:
            trained[i].step()
            taken[i] += [trained[i].seconds(clock) for _ in range(options.steps)]
        told(f"round {number + 1} of {options.rounds}")
    everyone: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, taken)
    if dist.get_rank() == 0:
        together = [[max(times) for times in zip(*ranks, strict=True)] for ranks in zip(*everyone, strict=True)]
        show(trained, together, median_cluster(measured[1:]), options.clock)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
