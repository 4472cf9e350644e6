"""The largest difference between a planned model and the same model in one process, trained on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_difference(
    built: Callable[[], nn.Module],
    preset: str,
    *,
    steps: int = 3,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
    trained: Callable[[nn.Module], list[torch.Tensor]] = lambda model: [*model.parameters()],
) -> float:
    """The largest difference of losses, and of the gradients of `trained`, in SGD steps on an input "x" of (8, 16).

    `built` makes the model, which returns its loss; `before` may modify it before each step.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        models.append(built())
        torch.set_default_dtype(torch.float32)
    alone, model = models
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(model, {"x": _batch(0)}, mesh, optimizer="sgd", constraints=preset)
    worst = 0.0
    for step in range(steps):
        losses = []
        for one in (model, alone):
            before(one, step)
            losses.append(one(_batch(step)))
            losses[-1].backward()
        worst = max(worst, _difference(*losses))
        for mine, its in zip(trained(model), trained(alone), strict=True):
            worst = max(worst, _difference(mine.grad, its.grad))
            for tensor in (mine, its):
                if tensor.grad is not None:
                    tensor.data.add_(tensor.grad, alpha=-0.1)
                    tensor.grad = None
    return worst


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _difference(mine: Any, its: Any) -> float:
    if mine is None or its is None:
        return 0.0 if mine is its else float("inf")
    mine, its = whole(mine.detach()), its.detach()
    return ((mine - its).abs().max() / (1 + its.abs().max())).item()


def pair(build: Callable[[], nn.Module], examples: dict[str, Any], preset: str, **options: Any) -> list[Any]:
    """A model planned on all ranks, and the same model without a plan, both in double precision."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(build().double())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    autopar.autoparallelize(made[0], examples, mesh, constraints=preset, **options)
    return made
