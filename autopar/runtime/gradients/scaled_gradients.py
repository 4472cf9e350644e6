"""A tensor whose gradient comes back multiplied."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.gradients.second_derivatives import changed_owner


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
        return changed_owner(gradient, lambda own: own * ctx.factor), None
