"""Ranks whose later calls train other parameters, or evaluate: measured peaks, and each plan's prediction."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.stored.carried import planned_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import PeakMemory

WIDTH, ROWS = 256, 8


class Staged(nn.Module):
    """A body that is trained first, then a head alone, then both; the head applies one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head[1].weight = self.head[0].weight

    def forward(self, x: torch.Tensor, of: str) -> torch.Tensor:
        x = x if of == "head" else self.body(x)
        return (x if of == "body" else self.head(x)).square().mean()


def peaks(preset: str, optimizer: str) -> dict[str, Any]:
    """Peaks of a step of each kind once all kinds are known, and of a call without gradients."""
    batch = {"x": torch.ones(ROWS, WIDTH)}
    model = autopar.autoparallelize(
        Staged(), {**batch, "of": "body"}, init_device_mesh("cpu", (2,)), constraints=preset, optimizer=optimizer
    )
    made = {"adamw": torch.optim.AdamW, "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    steps = made[optimizer](model.parameters())

    def step(of: str, train: bool) -> None:
        if not train:
            with torch.no_grad():
                model(**batch, of=of)
            return
        model(**batch, of=of).backward()
        steps.step()
        steps.zero_grad()

    kinds = {"body": ("body", True), "head": ("head", True), "both": ("both", True), "evaluated": ("both", False)}
    first = autopar.plan_of(model).predicted.peak_bytes
    for kind in kinds.values():
        step(*kind)
    found: dict[str, Any] = {"first": first}
    programs = sorted(planned_of(model).programs, key=lambda program: program.number)
    for (name, kind), program in zip(kinds.items(), programs, strict=True):
        memory = PeakMemory(torch.device("cpu"))
        with memory.measure(model, steps, batch):
            step(*kind)
        found[name] = {"measured": memory.peak_bytes, "predicted": program.plan.predicted.peak_bytes}
    return found


def warned() -> list[str]:
    """Warnings where a budget only has room for the first kind of step."""
    batch = {"x": torch.ones(ROWS, WIDTH)}
    mesh = init_device_mesh("cpu", (2,))
    needed = autopar.plan(Staged(), {**batch, "of": "body"}, mesh, constraints="ddp").predicted.peak_bytes
    model = autopar.autoparallelize(
        Staged(), {**batch, "of": "body"}, mesh, constraints="ddp", memory_budget=needed + 1000
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(**batch, of="head").backward()
        with torch.no_grad():
            model(**batch, of="both")
    return [str(one.message) for one in said if issubclass(one.category, UserWarning)]


class Skipping(nn.Module):
    """In training it reads values of its rows; otherwise it can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and float(x.sum()) < 0:
            return x.mean()
        return self.layer(x).square().mean()


def leaf_in_training() -> float:
    """A module that is a leaf in calls of one kind only: the difference of all calls from one process."""
    torch.manual_seed(0)
    alone, x = Skipping(), torch.ones(ROWS, WIDTH)
    model = Skipping()
    model.load_state_dict(alone.state_dict())
    model = autopar.autoparallelize(model, {"x": x}, init_device_mesh("cpu", (2,)), constraints="leaf:forward")
    model(x).backward()
    model.eval()
    with torch.no_grad():
        return abs(model(x).item() - alone.eval()(x).item())


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{preset}, {optimizer}": functools.partial(peaks, preset, optimizer)
        for preset in ("ddp", "fsdp")
        for optimizer in ("adamw", "sgd-momentum")
    }
    | {"warned": warned, "leaf_in_training": leaf_in_training}
}
