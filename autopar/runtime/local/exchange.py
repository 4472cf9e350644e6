"""Sums and exchanges over mesh axes inside local code, with the gradients that the layouts there require."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.runtime.communication import collectives
from autopar.runtime.communication.collectives import LocalMesh, ReduceOp
from autopar.runtime.communication.compiled_outputs import as_output
from autopar.runtime.gradients.second_derivatives import are_differentiated


def reduced(tensor: torch.Tensor, op: ReduceOp, axes: Sequence[int], mesh: LocalMesh) -> torch.Tensor:
    """The sum, maximum or minimum over `axes`; not differentiable."""
    for axis in axes:
        tensor = collectives.all_reduce(tensor, op, mesh.groups[axis])
    return tensor


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: tuple[int, ...], mesh: LocalMesh) -> torch.Tensor:
        ctx.route = axes, mesh
        return as_output(reduced(tensor, "sum", axes, mesh))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Given.apply(gradient, *ctx.route) if are_differentiated() else gradient, None, None


class _Given(torch.autograd.Function):
    """The backward of `_Joined`, differentiable."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, axes: tuple[int, ...], mesh: LocalMesh) -> torch.Tensor:
        ctx.route = axes, mesh
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Joined.apply(gradient, *ctx.route), None, None


def joined(summands: torch.Tensor, axes: Sequence[int], mesh: LocalMesh) -> torch.Tensor:
    """P to R over `axes`: the sum. Its gradient is whole on every rank, and is the gradient of each summand too."""
    return _Joined.apply(summands, tuple(axes), mesh) if axes else summands


def handed_out(gradient: torch.Tensor, axes: Sequence[int], mesh: LocalMesh) -> torch.Tensor:
    """A gradient, whole on all ranks, from which each computes that of its part; its own gradients are then summed."""
    return _Given.apply(gradient, tuple(axes), mesh) if axes else gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: tuple[int, ...], mesh: LocalMesh) -> torch.Tensor:
        ctx.route = axes, mesh
        return as_output(reduced(tensor, "sum", axes, mesh))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if are_differentiated():
            return _Summed.apply(gradient, *ctx.route), None, None
        return reduced(gradient, "sum", *ctx.route), None, None


def summed(summands: torch.Tensor, axes: Sequence[int], mesh: LocalMesh) -> torch.Tensor:
    """P to R+ over `axes`: the sum. Each rank has a summand of its gradient, so backward sums too."""
    return _Summed.apply(summands, tuple(axes), mesh) if axes else summands


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
        ctx.route = received, sent, group
        return moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if are_differentiated():
            return _Exchanged.apply(gradient, *ctx.route), None, None, None
        return moved(gradient, *ctx.route), None, None, None


def moved(rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    """`exchange` without gradients."""
    width = math.prod(rows.shape[1:])
    counts = [[count * width for count in counts] for counts in (sent, received)]
    return collectives.all_to_all(rows.flatten(), counts[0], counts[1], group).view(sum(received), *rows.shape[1:])


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    """Send rows, ordered by destination (`sent[r]` of them to rank r); returns those received, ordered by source."""
    arrived: torch.Tensor = _Exchanged.apply(rows, sent, received, group)
    return arrived
