"""What a call returns to the user: plain whole tensors, DTensors for sharded ones, or this rank's rows of either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.layout import Layout
from autopar.runtime.communication.collectives import LocalMesh, all_reduce
from autopar.runtime.gradients.scaled_gradients import with_scaled_gradient
from autopar.runtime.gradients.second_derivatives import are_differentiated, changed_owner
from autopar.runtime.stored.parameters import placements

OutputLayout = tuple[Layout, tuple[int, ...], tuple[int, ...]] | None
"""Layout, global shape and global strides of an output; None for what is no tensor."""


def returned(values: Sequence[Any], lie: Sequence[OutputLayout], device_mesh: DeviceMesh, *, whole: bool) -> list[Any]:
    """The outputs of a call as the user gets them."""
    beside_loss = torch.compiler.is_compiling() and any(map(is_loss, values))
    pairs = zip(values, lie, strict=True)
    return [for_user(*pair, device_mesh, beside_loss=beside_loss, whole=whole) for pair in pairs]


def each_averaged(
    values: Sequence[Any], lie: Sequence[OutputLayout], mesh: LocalMesh, dims: Sequence[int] = ()
) -> list[Any]:
    """Average over the ranks the gradients of outputs that all ranks have whole, as DistributedDataParallel does: with
    rows of its own, each rank may compute a loss of its own from them.

    Not for a loss that is the only output, since all ranks then start from the same gradient, nor for outputs that have
    own rows by `dims`, which do this themselves (`rows_of_rank`).
    """
    trained = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    if len(trained) == 1 and is_loss(trained[0]):
        return list(values)
    along = iter(dims)
    averaged = []
    for value, at in zip(values, lie, strict=True):
        own = at is not None and next(along, -1) >= 0
        is_plain = isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, DTensor)
        averaged.append(_MeanOfRanks.apply(value, mesh) if is_plain and not own else value)
    return averaged


def rows_or_whole(
    values: Sequence[Any], lie: Sequence[OutputLayout], device_mesh: DeviceMesh, dims: Sequence[int]
) -> list[Any]:
    """This rank's rows, along `dims`, of outputs that have rows, and the whole of others; differentiable."""
    along = iter(dims)
    results = []
    for value, at in zip(values, lie, strict=True):
        dim = -1 if at is None else next(along)
        if dim >= 0:
            value = rows_of_rank(value, device_mesh, dim)
        results.append(value.full_tensor() if isinstance(value, DTensor) else value)
    return results


def each_own_rows(
    values: Sequence[Any], lie: Sequence[OutputLayout], device_mesh: DeviceMesh, dims: Sequence[int]
) -> list[Any]:
    """This rank's rows of all outputs; `dims`: for each tensor, the dim along which they lie."""
    along = iter(dims)
    pairs = zip(values, lie, strict=True)
    return [value if at is None else _rows_or_as_is(value, device_mesh, next(along)) for value, at in pairs]


def _rows_or_as_is(value: torch.Tensor, device_mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's rows of an output along a dim, or the whole if `dim` is -1. While gradients are enabled, an output
    whose rows would have to be sent stays as it is."""
    if torch.is_grad_enabled() and not are_here(value, dim):
        return value
    if dim >= 0:
        return rows_of_rank(value, device_mesh, dim)
    return value.full_tensor() if isinstance(value, DTensor) else value


def for_user(value: Any, output: OutputLayout, device_mesh: DeviceMesh, *, beside_loss: bool, whole: bool) -> Any:
    """A plain tensor where an output is whole or is wanted `whole`, a DTensor where it is sharded.

    A compiled graph fixes the kind of gradient of each output, and wants a DTensor for a DTensor even if no gradient
    comes. So sharded outputs `beside_loss` are detached in compiled graphs (pytorch/pytorch#172556).
    """
    if output is None or output[0].is_replicated:
        return value
    layout, shape, stride = output
    if beside_loss:
        value = value.detach()
    if stride == torch.empty(shape, device="meta").stride():
        value = value.contiguous()  # so that ops which are views of the whole are views here
    sharded = DTensor.from_local(
        value, device_mesh, placements(layout), run_check=False, shape=torch.Size(shape), stride=stride
    )
    if sharded.grad_fn is not None and not torch.compiler.is_compiling():
        sharded.register_hook(partial(_laid_out, placements=sharded.placements))
    return sharded.full_tensor() if whole else sharded


def _laid_out(gradient: Any, placements: Sequence[Placement]) -> Any:
    """A gradient to be differentiated again, in its output's layout: `from_local` would move it without history."""
    is_other = are_differentiated() and isinstance(gradient, DTensor) and gradient.placements != tuple(placements)
    return gradient.redistribute(placements=placements) if is_other else None


def is_loss(value: Any) -> bool:
    """Whether a value is a scalar from which a backward pass can start."""
    return isinstance(value, torch.Tensor) and not value.ndim and value.requires_grad


def as_float32(value: Any) -> Any:
    """An output of half precision as float32, anything else as it is."""
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def rows_of_rank(value: torch.Tensor, device_mesh: DeviceMesh, dim: int = 0) -> torch.Tensor:
    """This rank's rows, along a dim, of a tensor that all ranks have, or of a DTensor."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
    mine: torch.Tensor = value.redistribute(placements=[Shard(dim)] * device_mesh.ndim).to_local()
    return with_scaled_gradient(mine, 1 / device_mesh.size()) if mine.requires_grad else mine


def are_here(value: torch.Tensor, dim: int) -> bool:
    """Whether each rank already holds its rows along a dim, so that nothing has to be sent."""
    placements = value.placements if isinstance(value, DTensor) else ()
    return all(placement.is_replicate() or placement == Shard(dim) for placement in placements)


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mesh: LocalMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return changed_owner(gradient, partial(_averaged, mesh=ctx.mesh)), None


def _averaged(gradient: torch.Tensor, mesh: LocalMesh) -> torch.Tensor:
    for size, group in zip(mesh.shape, mesh.groups, strict=True):
        gradient = all_reduce(gradient, "sum", group) if size > 1 else gradient
    return gradient / math.prod(mesh.shape)
