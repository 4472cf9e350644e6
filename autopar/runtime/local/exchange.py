"""Sums over mesh axes inside local code, with the gradient that the layouts there call for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.runtime import collectives
from autopar.runtime.collectives import LocalMesh, ReduceOp


def reduced(tensor: torch.Tensor, op: ReduceOp, axes: Sequence[int], mesh: LocalMesh) -> torch.Tensor:
    """The sum, maximum or minimum over `axes`; not differentiable."""
    for axis in axes:
        tensor = collectives.all_reduce(tensor, op, mesh.groups[axis])
    return tensor


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: tuple[int, ...], mesh: LocalMesh) -> torch.Tensor:
        return reduced(tensor, "sum", axes, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


def joined(summands: torch.Tensor, axes: Sequence[int], mesh: LocalMesh) -> torch.Tensor:
    """P to R over `axes`: the sum, whose gradient is whole on every rank and so is each summand's."""
    return _Joined.apply(summands, tuple(axes), mesh) if axes else summands
