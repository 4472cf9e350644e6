"""A tensor whose gradient comes back multiplied."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.second_derivatives import are_differentiated


def with_scaled_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The same numbers; what is asked of them counts `factor` times."""
    scaled: torch.Tensor = _Scaled.apply(tensor, factor)
    return scaled


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if are_differentiated():
            return _Multiplied.apply(gradient, ctx.factor), None
        return gradient * ctx.factor, None


class _Multiplied(torch.autograd.Function):
    """A gradient of all ranks' losses becomes one of a rank's own, or the other way round. What is asked of it is of
    the other kind than what it is asked for, so that the factor and its inverse meet."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        return gradient * factor

    @staticmethod
    def backward(ctx: Any, asked: torch.Tensor) -> tuple[torch.Tensor, None]:
        return asked, None
