"""Gradients of `redistribute()`, `to_local()` and `full_tensor()`, differentiated again (`create_graph=True`).

Torch 2.11 wraps such a gradient in a DTensor without recording it in autograd's graph. Second derivatives then silently
lack what flows through it, for example the curvature of a loss that is computed on an output of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._redistribute import Redistribute

Again = Callable[[Any, DTensor], torch.Tensor]


@functools.cache
def mend_gradients() -> None:
    """Make these gradients differentiable, from now on; patches torch once per process."""
    kinds: tuple[tuple[Any, Again], ...] = ((_ToTorchTensor, _wrapped), (Redistribute, _moved))
    for function, again in kinds:
        function.backward = staticmethod(_differentiable(function.backward, again))


def _differentiable(own: Callable[..., Any], again: Again) -> Callable[..., tuple[Any, ...]]:
    """Torch's `own` backward; if its gradient must be differentiable and has no history, `again` computes it with
    functions that autograd records."""

    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        result, *others = own(ctx, gradient)
        is_asked = torch.is_grad_enabled() and gradient is not None and gradient.requires_grad
        if is_asked and result is not None and result.grad_fn is None:
            result = again(gradient, result)
        return (result, *others)

    return backward


def _wrapped(gradient: torch.Tensor, like: DTensor) -> torch.Tensor:
    options: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(gradient, like.device_mesh, like.placements, run_check=False, **options)


def _moved(gradient: DTensor, like: DTensor) -> torch.Tensor:
    moved: torch.Tensor = gradient.redistribute(placements=like.placements)
    return moved.to(like.dtype)
