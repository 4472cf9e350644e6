"""Helpers of the cases on real ranks: apply a hand-made plan, train, and compare with one process."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hand_made import HandTraced, Net, announced, batch, plan, trace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.plans import Plan
from autopar.runtime.application import apply

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
from counting import CollectiveCounter

STEPS = 3


@functools.lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def no_replan(*_: Any) -> Any:
    raise AssertionError("this case has one kind of call")


def applied(shape: tuple[int, ...], styles: tuple[str, ...], **options: Any) -> tuple[nn.Module, HandTraced, Plan]:
    torch.manual_seed(dist.get_rank())  # ranks start with different weights, of which rank 0's are used
    model = Net().double()
    traced = trace(model, batch(0))
    made = plan(traced, shape, styles, **options)
    return apply(model, traced, made, mesh_of(shape), replan=no_replan), traced, made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = None) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reference() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}


def error_of(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between the states of two models; DTensors are gathered."""
    state, want = whole(model), whole(other)
    assert list(state) == list(want)
    return max((state[k] - want[k]).abs().max().item() for k in want)


def equals_one_process(shape: tuple[int, ...], styles: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Losses and parameters after several steps compared with one process, and the collectives of one step."""
    alone = reference()
    losses_alone = train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), clip=0.5)
    model, traced, made = applied(shape, styles, **options)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), clip=0.5)
    with CollectiveCounter(mesh_of(shape)) as counter:
        model(**batch(0)).backward()
    placements = {n: (p.grad.placements == p.placements) for n, p in model.named_parameters()}  # type: ignore[union-attr]
    return {
        "loss_error": max(abs(a - b) for a, b in zip(losses, losses_alone, strict=True)),
        "parameter_error": error_of(model, alone),
        "counted": counter.table(),
        "announced": announced(traced, made),
        "gradients_lie_as_parameters": all(placements.values()),
    }


SEGMENT = (("linear_1", "tanh_1"),)
