"""The plans of the equality runs: four kinds for each model; each plan is checked to be of its kind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import models
from promotion import Promotion

import autopar
import autopar.cluster
from autopar import Precision
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.plans import Plan
from autopar.stopwatch import Stopwatch

GAP = 0.05  # relative gap of the solver: the plans need not be optimal
KINDS = ("free", "sharded", "recompute", "tp", "asked")
OPTIMIZERS = {"float64": "adamw", "float32": "sgd-momentum"}


@dataclass(frozen=True)
class Job:
    """One case: a model in a dtype on a mesh, under a plan of one kind."""

    model: str
    dtype: str
    mesh: tuple[int, ...]
    kind: str
    device: str = "cpu"

    @property
    def id(self) -> str:
        on = "" if self.device == "cpu" else f"-{self.device}"
        return f"{self.model}-{self.dtype}-{'x'.join(map(str, self.mesh))}-{self.kind}{on}"


def gathers_parameters(plan: Plan) -> bool:
    """Whether a trainable parameter is stored sharded and gathered before use."""
    gathered = {c.cause for c in plan.collectives if c.kind == "all_gather" and c.phase == "forward"}
    readers = {n for i, bucket in enumerate(plan.buckets) if f"bucket {i}" in gathered for n in bucket.names}
    return any(p.trainable and not p.storage.is_replicated and p.name in readers for p in plan.parameters)


def shards_tensors(plan: Plan) -> bool:
    """Whether an op reads a shard of a weight, i.e. a parameter that is sharded where it is used."""
    return any(p.trainable and not p.storage.is_replicated for p in plan.parameters)


IS_OF_KIND: dict[str, Callable[[Plan], bool]] = {
    "free": lambda plan: not plan.recompute,
    "sharded": gathers_parameters,
    "recompute": lambda plan: bool(plan.recompute),
    "tp": shards_tensors,
    "asked": shards_tensors,
}


def eager_cluster(shape: tuple[int, ...], preset_name: str = "cpu") -> autopar.Cluster:
    """A cluster of slow devices on a fast network without latency, where sharding pays even for few weights."""
    preset = autopar.Cluster.preset(preset_name, shape=shape)
    device = replace(
        preset.device, launch_seconds=0.0, bytes_per_s=1e9, flops_per_s=dict.fromkeys(preset.device.flops_per_s, 1e9)
    )
    axes = tuple(
        autopar.cluster.Axis(axis.name, axis.size, latency_seconds=1e-9, bytes_per_s=1e9 * (index + 1))
        for index, axis in enumerate(preset.axes)
    )
    return replace(preset, device=device, axes=axes)


def make_plans(jobs: Sequence[Job]) -> dict[Job, Plan | Exception]:
    """Plans of jobs that differ only in their kind and so share one trace. The other device is planned for as a GPU."""
    model_name, dtype_name, mesh = jobs[0].model, jobs[0].dtype, jobs[0].mesh
    dtype = getattr(torch, dtype_name)
    found: dict[Job, Plan | Exception] = {}
    with Promotion() if dtype_name == "float64" else contextlib.nullcontext():
        model = models.build(model_name, dtype)
        request = request_of(
            eager_cluster(mesh, "cpu" if jobs[0].device == "cpu" else "h100"),
            memory_budget=None,
            precision=Precision(),
            micro_batches=1,
            optimizer=OPTIMIZERS[dtype_name],
            constraints=(),
            loss_fn=models.CASES[model_name].loss_fn,
            inputs="global",
            time_limit=60,
        )
        watch = Stopwatch()
        traced = trace_for(model, models.batch(model_name, 0, dtype), None, request, watch)
        prepared = prepare(model, traced, request, watch)
        ladder = Ladder(prepared)
        for job in jobs:
            try:
                found[job] = ladder.plan(job.kind)
            except Exception as error:
                found[job] = error
    return found


class Ladder:
    """The plans of one graph under several budgets; each is solved only once."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.free = prepared.solve(gap=GAP)
        self.steps: dict[float, Plan] = {}
        self.least = 0

    def plan(self, kind: str) -> Plan:
        """The free plan; the preset tp; a preset with all its options ("asked"); or the first plan under a budget that
        is of this kind and, if none is, the plan of a preset."""
        if kind == "free":
            return self.free
        if kind == "tp":
            return self.prepared.solve(constraints=("tp",), gap=GAP)
        if kind == "asked":
            shape = self.prepared.request.cluster.shape
            preset, recompute = ("fsdp+tp", "full") if len(shape) > 1 else ("tp", "selective")
            options = ["sequence=split", *(["zero=2"] * (len(shape) > 1))]
            options += [f"recompute={recompute}"] * bool(self.prepared.repeats)
            return self.prepared.solve(constraints=(f"{preset}({', '.join(options)})",), gap=GAP)
        if not self.least:
            self.least = smallest_budget(self.prepared)
        most = self.free.predicted.peak_bytes
        # with less memory a plan may recompute instead of having the kind's property
        for part in (0.3, 0.1, 0.03, 0.0, 0.6):
            if part not in self.steps:
                budget = int(self.least + part * (most - self.least)) + 1
                self.steps[part] = self.prepared.solve(memory_budget_bytes=budget, gap=GAP)
            if IS_OF_KIND[kind](self.steps[part]):
                return self.steps[part]
        asked = self.prepared.solve(constraints=("fsdp(recompute=full)",), gap=GAP)
        if not IS_OF_KIND[kind](asked):
            raise AssertionError(f"no budget from {self.least} to {most} bytes gives a plan of kind '{kind}'")
        return asked


def smallest_budget(prepared: Prepared) -> int:
    """The smallest budget that the planner reports."""
    with pytest.raises(autopar.InfeasibleError) as refused:
        prepared.solve(memory_budget_bytes=1, gap=GAP)
    assert refused.value.smallest_budget_bytes is not None
    return refused.value.smallest_budget_bytes


def plan_to_files(jobs: Sequence[Job], folder: Path) -> dict[str, str]:
    """Plan the jobs into `folder`; returns an error message for each job, "" if there was none."""
    torch.set_num_threads(1)
    outcome = {}
    for job, plan in make_plans(jobs).items():
        outcome[job.id] = repr(plan) if isinstance(plan, Exception) else ""
        if isinstance(plan, Plan):
            plan.save(folder / f"{job.id}.plan.json")
    return outcome
