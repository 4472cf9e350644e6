"""A tensor whose gradient is multiplied by a factor in backward."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.gradients.second_derivatives import changed_owner


def with_scaled_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The same values; their gradient is multiplied by `factor`."""
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
