"""Maxima and minima over sharded dims.

torch divides the gradient equally among all elements that equal the extremum; after a ReLU, say, these can be many. So
the ranks count such elements together: a rank that holds more of them gets more of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.communication.collectives import LocalMesh, ReduceOp
from autopar.runtime.communication.compiled_outputs import as_output
from autopar.runtime.gradients.second_derivatives import are_differentiated
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import handed_out, reduced


def extremum(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`amax` and `amin`, and `max` and `min` of a whole tensor, with the final result on every rank."""
    op: ReduceOp = "max" if target.__name__ in ("max", "amax") else "min"
    return _extremum(ctx, op, *args, **kwargs)


def _extremum(
    ctx: LocalContext,
    op: ReduceOp,
    input: torch.Tensor,
    dim: int | tuple[int, ...] | list[int] = (),
    keepdim: bool = False,
    *,
    axis: int | tuple[int, ...] | list[int] | None = None,
    keepdims: bool = False,
) -> torch.Tensor:
    dim_or_axis = dim if axis is None else axis
    listed = [dim_or_axis] if isinstance(dim_or_axis, int) else dim_or_axis
    dims = tuple(sorted({d % input.ndim for d in listed})) or tuple(range(input.ndim))  # none given: all
    axes = ctx.axes_that_shard(ctx.inputs[0], *dims)
    result: torch.Tensor = _Extremum.apply(input, op, dims, axes, ctx.mesh)
    return result if keepdim or keepdims else result.squeeze(dims)


class _Extremum(torch.autograd.Function):
    """Keeps the reduced dims; the gradient is divided equally among the elements of all ranks that equal the result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, op: ReduceOp, dims: tuple[int, ...], axes: tuple[int, ...], mesh: LocalMesh
    ) -> torch.Tensor:
        own = x.amax(dims, keepdim=True) if op == "max" else x.amin(dims, keepdim=True)
        value = reduced(own, op, axes, mesh)
        ctx.dims, ctx.axes, ctx.mesh = dims, axes, mesh
        ctx.save_for_backward(x, value)
        return as_output(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, value = ctx.saved_tensors
        with torch.no_grad():
            is_extreme = x == value
            wide = torch.promote_types(gradient.dtype, torch.float32)  # half precision counts only to some hundreds
            count = reduced(is_extreme.sum(ctx.dims, keepdim=True, dtype=wide), "sum", ctx.axes, ctx.mesh)
        if are_differentiated():
            gradient = handed_out(gradient, ctx.axes, ctx.mesh)
        return (gradient / count).to(gradient.dtype) * is_extreme, None, None, None, None
