"""A feature on and off on real ranks, in interleaved pairs: step time, and peak bytes of live tensors.

    torchrun --standalone --nproc-per-node 2 scripts/ablation/measured.py RUNS.json     # started by ablate.py

=============  =====================================================================================================
overlap        "fsdp"; off: each rank waits for every collective of a bucket as soon as it has started it
recompute      "ddp", with a budget halfway between its smallest one and the peak without recompute; off: no budget,
               and nothing is recomputed
micro-batches  "ddp" with 4 micro-batches; off: the whole batch at once
zero           "fsdp", with sharded storage; off: "ddp", with replicated storage
=============  =====================================================================================================

A pair is one step of each side (forward, backward, fused AdamW, zero_grad) in one process, in alternating order,
between barriers. Both sides train the same model: their losses are compared first, and there is no result if they
differ. The script reads a JSON list of runs, and after each writes results by feature to `RUNS.done.json`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import LiveStorages
from side_by_side import keep_freed_memory
from step_cases import CASES, Batch, Case, batch, build, gpt2
from step_time import median_with_interval

from autopar import Cluster, InfeasibleError, Plan, autoparallelize, plan
from autopar.runtime.communication.flights import Flight

MODELS = {
    "gpt2-small": Case(lambda: gpt2(4, 384, 6, 4096), 8, 128, 4096, "transformer.h"),
    "gpt2-tiny": Case(lambda: gpt2(2, 64, 4, 512), 4, 32, 512, "transformer.h"),
    "gpt2": CASES["gpt2"],
}
FEATURES = ("overlap", "recompute", "micro-batches", "zero")
WARM_UP, MICRO_BATCHES = 2, 4  # steps before measuring; micro-batches with that feature on


@contextmanager
def waited_at_once() -> Iterator[None]:
    """Wait for each collective of a bucket as soon as it starts, so that none overlaps with compute."""
    begin = Flight.__init__

    def at_once(flight: Flight, *args: Any, **kwargs: Any) -> None:
        begin(flight, *args, **kwargs)
        flight.finish()

    Flight.__init__ = at_once  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Flight.__init__ = begin  # type: ignore[method-assign]


@dataclass(frozen=True)
class Side:
    """One side of a pair: the plan, and a context for its steps."""

    plan: Plan
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def sides(feature: str, case: Case, ranks: int) -> tuple[Side, Side]:
    """The sides with the feature on, and off."""

    def made(scheme: str, count: int = 1, budget: int = 1 << 60, *more: str) -> Plan:
        rows = ranks * case.rows // count
        cluster = Cluster.preset("cpu", (ranks,), ("ranks",))
        return plan(
            build(case),
            batch(case, 0, rows),
            cluster,
            constraints=(scheme, *more),
            memory_budget=budget,
            micro_batches=count,
        )

    if feature == "overlap":
        sharded = made("fsdp")
        return Side(sharded), Side(sharded, waited_at_once)
    if feature == "recompute":
        free = made("ddp", 1, 1 << 60, "recompute:* = never")
        middle = (_smallest(lambda: made("ddp", 1, 1)) + free.predicted.peak_bytes) // 2
        return Side(made("ddp", 1, middle)), Side(free)
    if feature == "micro-batches":
        return Side(made("ddp", MICRO_BATCHES)), Side(made("ddp"))
    assert feature == "zero", feature
    return Side(made("fsdp")), Side(made("ddp"))


def _smallest(planned: Callable[[], Plan]) -> int:
    """The smallest budget that has a plan, in bytes; `planned` asks for a plan with a budget that is too small."""
    try:
        made = planned()
    except InfeasibleError as error:
        if error.smallest_budget_bytes is None:
            raise
        return error.smallest_budget_bytes
    raise AssertionError(f"a plan of {made.predicted.peak_bytes} bytes fits one byte")


class Trained:
    """A model under a side's plan, with its optimizer."""

    def __init__(self, side: Side, case: Case, ranks: int) -> None:
        self.side, self.case, self.ranks = side, case, ranks
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
        rows = ranks * case.rows // side.plan.micro_batches
        self.model = autoparallelize(build(case), batch(case, 0, rows), mesh, plan=side.plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def parts(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        many, whole = self.side.plan.micro_batches, batch(self.case, step, self.ranks * self.case.rows)
        rows = self.ranks * self.case.rows // many
        return [{name: t[i * rows : (i + 1) * rows] for name, t in whole.items()} for i in range(many)]

    def step(self, parts: list[Batch]) -> float:
        total = 0.0
        with self.side.around():
            for some in parts:
                loss = self.model(**some).loss / len(parts)
                loss.backward()
                total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def seconds(self, step: int) -> float:
        parts = self.parts(step)
        dist.barrier()
        start = time.perf_counter()
        self.step(parts)
        dist.barrier()
        return time.perf_counter() - start

    def peak_bytes(self, step: int) -> int:
        """The largest peak of any rank."""
        parts = self.parts(step)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        inputs = [t for some in parts for t in some.values()]
        with LiveStorages([*self.model.parameters(), *self.model.buffers(), *states, *inputs]) as live:
            self.step(parts)
        largest = torch.tensor(live.peak_bytes)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


def compare(feature: str, case: Case, pairs: int) -> dict[str, Any]:
    """Median figures of both sides, and the median ratio off / on in a pair with its 95 % interval."""
    ranks = dist.get_world_size()
    given = [sides(feature, case, ranks) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    assert given[0] is not None
    on, off = (Trained(side, case, ranks) for side in given[0])
    for step in range(WARM_UP):
        losses = on.step(on.parts(step)), off.step(off.parts(step))
        if abs(losses[0] - losses[1]) > 2e-3:
            raise AssertionError(f"{feature}: losses differ, this is no comparison: {losses}")
    times = []
    for step in range(pairs):
        order = (on, off) if step % 2 else (off, on)
        seconds = {id(trained): trained.seconds(WARM_UP + step) for trained in order}
        times.append((seconds[id(on)], seconds[id(off)]))
    low, middle, high = median_with_interval([b / a for a, b in times])
    return {
        "on_seconds": statistics.median(a for a, _ in times),
        "off_seconds": statistics.median(b for _, b in times),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "on_peak_bytes": on.peak_bytes(0),
        "off_peak_bytes": off.peak_bytes(0),
        "on_predicted_bytes": on.side.plan.predicted.peak_bytes,
        "off_predicted_bytes": off.side.plan.predicted.peak_bytes,
        "recomputed_segments": len(on.side.plan.recompute),
    }


def main() -> None:
    path = Path(sys.argv[1])
    keep_freed_memory()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    found = {}
    for run in json.loads(path.read_text()):
        found[run["feature"]] = compare(run["feature"], MODELS[run["model"]], run["pairs"])
        if dist.get_rank() == 0:
            path.with_suffix(".done.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
