"""The plans of the equality runs: four kinds for each model, each one really of its kind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import models
from promotion import Promotion

import autopar
import autopar.cluster
from autopar.plans import Plan

KINDS = ("free", "sharded", "recompute", "tp")
OPTIMIZERS = {"float64": "adamw", "float32": "sgd-momentum"}


@dataclass(frozen=True)
class Job:
    """One case: this model in this dtype on this mesh under a plan of this kind."""

    model: str
    dtype: str
    mesh: tuple[int, ...]
    kind: str

    @property
    def id(self) -> str:
        return f"{self.model}-{self.dtype}-{'x'.join(map(str, self.mesh))}-{self.kind}"


def gathers_parameters(plan: Plan) -> bool:
    """Whether a trainable parameter is stored sharded and gathered before its use."""
    readers = {c.cause.removeprefix("parameter ") for c in plan.collectives if c.kind == "all_gather" and c.phase == "forward"}
    return any(p.trainable and not p.storage.is_replicated and p.name in readers for p in plan.parameters)


def shards_tensors(plan: Plan) -> bool:
    """Whether an op works on a part of a weight: an input that is a parameter's, sharded where it is used."""
    return any(p.trainable and not p.storage.is_replicated for p in plan.parameters)


IS_OF_KIND: dict[str, Callable[[Plan], bool]] = {
    "free": lambda plan: not plan.recompute,
    "sharded": gathers_parameters,
    "recompute": lambda plan: bool(plan.recompute),
    "tp": shards_tensors,
}


def eager_cluster(shape: tuple[int, ...]) -> autopar.Cluster:
    """Slow devices on a fast network without latency, so that sharding pays even for a model of a few thousand weights."""
    preset = autopar.Cluster.preset("cpu", shape=shape)
    device = replace(preset.device, launch_seconds=0.0, bytes_per_s=1e9, flops_per_s=dict.fromkeys(preset.device.flops_per_s, 1e9))
    axes = tuple(
        autopar.cluster.Axis(axis.name, axis.size, latency_seconds=1e-9, bytes_per_s=1e9 * (index + 1))
        for index, axis in enumerate(preset.axes)
    )
    return replace(preset, device=device, axes=axes)


def make_plan(job: Job) -> Plan:
    """A plan of the job's kind: budgets are lowered step by step until the kind shows."""
    dtype = getattr(torch, job.dtype)
    case = models.CASES[job.model]
    with Promotion() if job.dtype == "float64" else contextlib.nullcontext():
        model = models.build(job.model, dtype)
        inputs = models.batch(job.model, 0, dtype)
        cluster = eager_cluster(job.mesh)

        def plan(**options: Any) -> Plan:
            return autopar.plan(
                model, inputs, cluster, loss_fn=case.loss_fn, optimizer=OPTIMIZERS[job.dtype], **options
            )

        if job.kind in ("free", "tp"):
            return plan(constraints="tp") if job.kind == "tp" else plan()
        most = plan().predicted.peak_bytes
        least = smallest_budget(plan)
        for part in (0.5, 0.25, 0.1, 0.03, 0.0):
            candidate = plan(memory_budget=int(least + part * (most - least)) + 1)
            if IS_OF_KIND[job.kind](candidate):
                return candidate
        raise AssertionError(f"no budget from {least} to {most} bytes gives a plan of kind '{job.kind}'")


def smallest_budget(plan: Callable[..., Plan]) -> int:
    try:
        plan(memory_budget=1)
    except autopar.InfeasibleError as error:
        assert error.smallest_budget_bytes is not None
        return error.smallest_budget_bytes
    raise AssertionError("a budget of one byte must be infeasible")


def plan_to_file(job: Job, folder: Path) -> str:
    """Plan the job into `folder`; the file's name."""
    torch.set_num_threads(1)
    name = f"{job.id}.plan.json"
    make_plan(job).save(folder / name)
    return name
