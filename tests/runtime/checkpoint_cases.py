"""Ranks that save under one plan and load under every other, in the folder that the variable `FOLDER` names.

Each checkpoint comes with what it must restore: all tensors whole, and the losses of the next steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from applying import applied, batch, train, whole
from hand_made import Net
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import InputError
from autopar.runtime.stored.model_class import ATTRIBUTE

ON_RANKS: dict[int, dict[str, tuple[tuple[int, ...], tuple[str, ...]]]] = {
    4: {
        "dp4": ((4,), ("dp",)),
        "tp4": ((4,), ("tp",)),
        "fsdp4": ((4,), ("fsdp",)),
        "dp2xtp2": ((2, 2), ("dp", "tp")),
        "tp2xfsdp2": ((2, 2), ("tp", "fsdp")),
        "dp2xfsdp2": ((2, 2), ("dp", "fsdp")),
    },
    2: {"tp2": ((2,), ("tp",)), "fsdp2": ((2,), ("fsdp",))},
}
PLANS = [name for plans in ON_RANKS.values() for name in plans]
Scheduler = torch.optim.lr_scheduler.LRScheduler


def trained_by(model: nn.Module) -> tuple[torch.optim.Optimizer, Scheduler]:
    """AdamW with two parameter groups, and a learning-rate schedule."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler) -> list[float]:
    losses = train(model, optimizer)
    scheduler.step()
    return losses + train(model, optimizer)


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor of model, optimizer and averaged model, whole, and the learning rates of the groups."""
    found = dict(whole(model))
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    found |= {f"average {name}": value for name, value in whole(average).items()} if average is not None else {}
    found["rates"] = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    return found


def differing(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not bit-identical."""
    assert found.keys() == want.keys()
    return [name for name, value in found.items() if not torch.equal(value, want[name])]


def folder_of(name: str) -> Path:
    return Path(os.environ["FOLDER"], name)


def save(name: str, shape: tuple[int, ...], styles: tuple[str, ...]) -> dict[str, Any]:
    model, *_ = applied(shape, styles)
    optimizer, scheduler = trained_by(model)
    go_on(model, optimizer, scheduler)
    average = averaged(model)
    average.update_parameters(model)
    held = {k: v.clone() for k, v in tensors_of(model, optimizer, average).items()}
    extra = {"schedule": scheduler, "average": average}
    asynchronous = PLANS.index(name) % 2 == 1
    saved = autopar.save_checkpoint(
        model, optimizer, folder_of(name), step=6, extra_state=extra, asynchronous=asynchronous
    )
    losses = go_on(model, optimizer, scheduler)  # changes every tensor while the checkpoint is being written
    average.update_parameters(model)
    path = saved.result()
    if dist.get_rank() == 0:
        torch.save({"tensors": held, "losses": losses}, path.parent / "expected.pt")
    return {"changed": len(differing(tensors_of(model, optimizer, average), held))}


def load(shape: tuple[int, ...], styles: tuple[str, ...]) -> dict[str, Any]:
    """Load each saved checkpoint into a model that has trained differently, or not at all."""
    found = {}
    for number, source in enumerate(PLANS):
        model, _, plan = applied(shape, styles)
        optimizer, scheduler = trained_by(model)
        if number % 2:
            go_on(model, optimizer, scheduler)
        found[source] = restored(source, model, optimizer, scheduler)
        held = autopar.latest_checkpoint(folder_of(source))
        assert held is not None and held.plan is not None
        mesh = getattr(model, ATTRIBUTE).device_mesh
        assert (held.plan_for(mesh) is not None) == (held.plan.mesh_shape == plan.mesh_shape)
    return found


def restored(source: str, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler) -> dict[str, Any]:
    """Load a checkpoint of another plan: tensors that are not bit-identical, and how far later losses deviate."""
    checkpoint = autopar.latest_checkpoint(folder_of(source))
    assert checkpoint is not None
    average = averaged(model)
    extra = {"schedule": scheduler, "average": average}
    step = autopar.load_checkpoint(model, optimizer, checkpoint, extra_state=extra)
    want = torch.load(folder_of(source) / "expected.pt", weights_only=True)
    different = differing(tensors_of(model, optimizer, average), want["tensors"])
    losses = go_on(model, optimizer, scheduler)
    deviation = max(abs(a - b) for a, b in zip(losses, want["losses"], strict=True))
    return {"step": step, "different": different, "deviation": deviation}


def untrained_and_frozen() -> dict[str, Any]:
    """A checkpoint before any step, with a frozen parameter: no optimizer state is invented."""
    folder = folder_of("untrained")
    found = {}
    for name in ("saved", "loaded"):
        model, *_ = applied((2,), ("fsdp",))
        model.down.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if name == "saved":
            autopar.save_checkpoint(model, optimizer, folder, step=0)
            found["states"] = len(optimizer.state)
        else:
            checkpoint = autopar.latest_checkpoint(folder)
            assert checkpoint is not None
            autopar.load_checkpoint(model, optimizer, checkpoint)
        found[name] = train(model, optimizer)
        found[f"{name} states"] = len(optimizer.state)
    return found


def factored_states() -> list[str]:
    """Adafactor's states are sums over rows and over columns, whose shapes differ from their parameters'.

    Only with whole parameters: torch's Adafactor refuses sharded ones.
    """
    folder, held = folder_of("adafactor"), []
    for _ in range(2):
        model, *_ = applied((2,), ("dp",))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        checkpoint = autopar.latest_checkpoint(folder)
        if checkpoint is None:
            train(model, optimizer)
            autopar.save_checkpoint(model, optimizer, folder, step=3)
        else:
            autopar.load_checkpoint(model, optimizer, checkpoint)
        held.append(tensors_of(model, optimizer))
    return differing(*held)


def mistakes() -> dict[str, str]:
    """The errors of mistakes, on every rank: no rank waits for another."""
    model, *_ = applied((2,), ("fsdp",), micro_batches=2)
    optimizer, scheduler = trained_by(model)
    rank, path = dist.get_rank(), folder_of("mistakes")
    good = folder_of("fsdp2") / "step-00000006"

    def accumulated() -> None:
        model(**batch(0)).backward()
        try:
            autopar.save_checkpoint(model, optimizer, path, step=1)
        finally:
            model.zero_grad()

    def own_disks() -> None:
        """A folder that only rank 0 has, as on machines without a shared filesystem."""
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(Path, "is_dir", lambda _: False)
            autopar.save_checkpoint(model, optimizer, path, step=1)

    of_another_kind = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], momentum=0.9)
    attempts: dict[str, Callable[[], Any]] = {
        "accumulated": accumulated,
        "own disks": own_disks,
        "step": lambda: autopar.save_checkpoint(model, optimizer, path, step=rank),
        "one rank": lambda: autopar.save_checkpoint(
            model, optimizer, path, step=1, extra_state={"f": print if rank else 1}
        ),
        "folder": lambda: autopar.load_checkpoint(model, optimizer, folder_of("fsdp2")),
        "model": lambda: autopar.load_checkpoint(nn.Linear(2, 2), None, good),
        "shape": lambda: autopar.load_checkpoint(Net(width=4).double(), None, good),
        "groups": lambda: autopar.load_checkpoint(model, torch.optim.AdamW(model.parameters()), good),
        "kind": lambda: autopar.load_checkpoint(model, of_another_kind, good),
        "extra": lambda: autopar.load_checkpoint(model, optimizer, good, extra_state={"loader": scheduler}),
        "extra optimizer": lambda: autopar.save_checkpoint(
            model, None, path, step=1, extra_state={"second": optimizer}
        ),
        "extra places": lambda: autopar.load_checkpoint(model, optimizer, good, extra_state={"average": scheduler}),
        "stale": lambda: autopar.save_checkpoint(model, torch.optim.SGD(Net().parameters()), path, step=1),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = "no error"
        except InputError as error:
            found[name] = str(error)
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    ranks: {f"save-{name}": functools.partial(save, name, *plan) for name, plan in plans.items()}
    | {f"load-{name}": functools.partial(load, *plan) for name, plan in plans.items()}
    for ranks, plans in ON_RANKS.items()
}
CASES[2] |= {case.__name__: case for case in (untrained_and_frozen, factored_states, mistakes)}
