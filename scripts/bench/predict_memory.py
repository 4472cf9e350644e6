"""The memory table of `scripts/bench/predict.py`: peak bytes of live storages on the worst rank, beside predicted.

The measurement counts more than `torch.distributed._tools.mem_tracker`: every storage that is input or output of an op
in the step, from its allocation until it is freed, including those inside DTensors.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import predict_models
import torch

from autopar import Cluster, plan
from autopar.plans import Plan
from autopar.sizes import show_bytes

PAIRS = Path(__file__).with_name("predict_pairs.json")
OPTIONS = ("constraints", "optimizer", "micro_batches", "precision")


@dataclass(frozen=True)
class Pair:
    """A model and how to plan it; `budget_of_ddp`: the budget relative to the peak of plain data parallelism."""

    number: int
    model: str
    batch: int
    length: int
    mesh: tuple[int, ...]
    options: Mapping[str, Any]
    budget_of_ddp: float | None = None

    @property
    def described(self) -> str:
        how = [str(v) for v in self.options.values() if v != "fp32"]
        if self.budget_of_ddp is not None:
            how.insert(0, f"own choice, budget {self.budget_of_ddp:g} of ddp")
        return ", ".join(how)


def pairs(words: Sequence[str] = ()) -> list[Pair]:
    """The pairs of the file whose model or description contains one of `words`; all if there are no words."""
    found = []
    for number, one in enumerate(json.loads(PAIRS.read_text())):
        options = {"precision": "fp32", **{name: one[name] for name in OPTIONS if name in one}}
        shape = tuple(one["mesh"])
        pair = Pair(number, one["model"], one["batch"], one["length"], shape, options, one.get("budget_of_ddp"))
        if not words or any(word in f"{pair.model} {pair.described}" for word in words):
            found.append(pair)
    return found


def plan_of(pair: Pair) -> Plan:
    """Plan the pair, with the model on the meta device."""
    with torch.device("meta"):
        model = predict_models.build(pair.model)
    batch = {k: v.to("meta") for k, v in predict_models.batch(pair.model, pair.batch, pair.length).items()}
    cluster = Cluster.preset("cpu", pair.mesh)
    budget = None
    if pair.budget_of_ddp is not None:
        options = {k: v for k, v in pair.options.items() if k != "constraints"}
        parallel = plan(model, batch, cluster, constraints="ddp", **options)
        budget = int(pair.budget_of_ddp * parallel.predicted.peak_bytes)
    return plan(model, batch, cluster, memory_budget=budget, **pair.options)


def run(words: Sequence[str], out: Path) -> int:
    """Plan all pairs, measure them with one launch per number of ranks, and print the table."""
    chosen = pairs(words)
    plans = {}
    for pair in chosen:
        plans[pair.number] = plan_of(pair)
        plans[pair.number].save(out / f"plan{pair.number}.json")
    measured: dict[int, int] = {}
    for ranks in sorted({math.prod(pair.mesh) for pair in chosen}):
        measured.update(_measure([p for p in chosen if math.prod(p.mesh) == ranks], ranks, out))
    print("\n".join(table(chosen, plans, measured)))
    return 0


def table(chosen: Sequence[Pair], plans: Mapping[int, Plan], measured: Mapping[int, int]) -> list[str]:
    """The table in Markdown, and below it the median and the worst error."""
    lines = [
        "| model | batch | ranks | plan | recomputed | sharded | predicted | at | measured | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    errors = []
    for pair in chosen:
        predicted, real = plans[pair.number].predicted, measured[pair.number]
        errors.append(predicted.peak_bytes / real - 1)
        at = max(predicted.moments, key=lambda moment: moment.total_bytes).name
        cut = [p for p in plans[pair.number].parameters if not p.storage.is_replicated]
        lines.append(
            f"| {pair.model} | {pair.batch} x {pair.length} | {'x'.join(map(str, pair.mesh))} | {pair.described} "
            f"| {len(plans[pair.number].recompute)} | {len(cut)} of {len(plans[pair.number].parameters)} "
            f"| {show_bytes(predicted.peak_bytes)} | {at} | {show_bytes(real)} | {100 * errors[-1]:+.1f} % |"
        )
    sizes = [abs(error) for error in errors]
    lines += [
        "",
        f"{len(errors)} pairs, {sum(measured[p.number] > 1 << 30 for p in chosen)} above 1 GiB: median error "
        f"{100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %, lowest {100 * min(errors):+.1f} %.",
    ]
    return lines


def _measure(chosen: Sequence[Pair], ranks: int, out: Path) -> dict[int, int]:
    """Measure pairs with `ranks` ranks in one launch: peak bytes on the worst rank."""
    jobs = [
        {
            "number": pair.number,
            "model": pair.model,
            "batch": pair.batch,
            "length": pair.length,
            "mesh": pair.mesh,
            "optimizer": pair.options.get("optimizer", "adamw"),
            "plan": str(out / f"plan{pair.number}.json"),
        }
        for pair in chosen
    ]
    (out / f"jobs{ranks}.json").write_text(json.dumps(jobs))
    worker = [str(Path(__file__).with_name("predict_worker.py")), str(out / f"jobs{ranks}.json")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *worker]
    subprocess.run(launch, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"})
    found = json.loads((out / f"jobs{ranks}.measured.json").read_text())
    return {int(number): int(size) for number, size in found.items()}
