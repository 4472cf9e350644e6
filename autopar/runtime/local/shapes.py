"""Ops with sizes among their arguments, called with the sizes of this rank's part in place of the global ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.layout import Layout
from autopar.ops.strided_dims import on_part
from autopar.runtime.local.context import LocalContext

_RESHAPES = {"view", "reshape", "view_as", "reshape_as", "unflatten", "flatten"}
_EXPANDS = {"expand", "expand_as", "broadcast_to"}
_PLACES_BACK = {"slice_backward", "select_backward"}
_FILLS = {"zeros", "ones", "empty"}


def shape(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """Views, repeats, grids, gradients of slices and factories with the output's local shape; another factory makes the
    whole and takes its part.

    A view becomes a reshape, as a part of a contiguous tensor may not be contiguous.
    """
    operator = isinstance(target, torch._ops.OpOverload)  # its `__name__` ends with the overload's
    name, local = target._opname if operator else target.__name__, ctx.local_shape()
    if name in _RESHAPES:
        return args[0].reshape(local)
    if name in _EXPANDS:
        return args[0].expand(local)
    if name in _PLACES_BACK:
        return target(args[0], local, *args[2:], **kwargs)
    if name == "repeat_interleave":
        return _repeated(local, *args, **kwargs)
    if name == "affine_grid":
        return _grid(local, *args, **kwargs)
    options = {k: v for k, v in kwargs.items() if k not in ("size", "fill_value")}
    if name in _FILLS:
        return target(local, **options)
    if name in {"new_" + fill for fill in _FILLS}:
        return target(args[0], local, **options)
    if name in ("full", "new_full"):
        own = args[:1] if name == "new_full" else ()
        value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
        return target(*own, local, value, **options)
    whole = target(*args, **kwargs)
    for dim, length in enumerate(ctx.shapes[0]):
        whole = whole.index_select(dim, ctx.positions(ctx.outputs[0], dim, length, whole.device))
    return whole


def _repeated(
    local: tuple[int, ...], input: torch.Tensor, repeats: int, dim: int, *, output_size: int | None = None
) -> torch.Tensor:
    return input.repeat_interleave(repeats, dim, output_size=local[dim])


def _grid(
    local: tuple[int, ...], theta: torch.Tensor, size: Sequence[int], align_corners: bool | None = None
) -> torch.Tensor:
    return torch.nn.functional.affine_grid(theta, [local[0], *size[1:]], align_corners)


def split(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`torch.split` and similar ops along a dim that is sharded within every part."""
    return _split(ctx, *args, **kwargs)


def _split(
    ctx: LocalContext, tensor: torch.Tensor, split_size_or_sections: Any = None, dim: int = 0, **_: Any
) -> tuple[torch.Tensor, ...]:
    return tensor.split([ctx.local_shape(i)[dim] for i in range(len(ctx.outputs))], dim)


def sliced(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """Indexing and `narrow`: bounds on a sharded dim are divided by its number of pieces.

    The dim is sharded within each stretch between bounds, so that the local bounds separate the same elements.
    """
    if target.__name__ == "narrow":
        return _narrow(ctx, *args, **kwargs)
    tensor, index = args
    items = index if isinstance(index, tuple) else (index,)
    return tensor[tuple(_local_items(items, ctx.inputs[0], ctx))]


def _narrow(ctx: LocalContext, input: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    dim %= input.ndim
    if length == ctx.input_shapes[0][dim]:
        return input
    pieces = ctx.pieces(ctx.inputs[0], dim)
    return input.narrow(dim, start // pieces, length // pieces)


def _local_items(items: tuple[Any, ...], layout: Layout, ctx: LocalContext) -> Iterator[Any]:
    sizes = ctx.input_shapes[0]
    dims_of_ellipsis = len(sizes) - sum(_dims_taken(item) for item in items)
    dim = 0
    for item in items:
        pieces = ctx.pieces(layout, dim) if isinstance(item, slice) else 1
        if isinstance(item, slice) and pieces > 1:
            indices = range(sizes[dim])[item]  # as `item.indices`, which torch 2.11 cannot compile
            start, stop, step = indices.start, indices.stop, indices.step
            if (start, stop, step) == (0, sizes[dim], 1):  # a dim taken whole may have unequal pieces
                yield slice(None)
            elif step == 1:
                yield slice(start // pieces, stop // pieces)
            else:
                yield slice(start, sizes[dim] // pieces, step)
        else:
            yield item
        dim += dims_of_ellipsis if item is Ellipsis else _dims_taken(item)


def _dims_taken(item: Any) -> int:
    """How many dims of the indexed tensor an item of an index takes up."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1


def masked_scatter(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`masked_scatter` on a part: the whole mask tells where in the source each element is."""
    return _masked_scatter(ctx, *args, **kwargs)


def _masked_scatter(ctx: LocalContext, input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    mask, input = mask.expand(ctx.shapes[0]), input.expand(ctx.local_shape())
    place = (mask.flatten().cumsum(0) - 1).clamp(0, source.numel() - 1).view(ctx.shapes[0])
    for dim, length in enumerate(ctx.shapes[0]):
        if input.shape[dim] != length:
            own_indices = ctx.positions(ctx.outputs[0], dim, length, mask.device)
            mask, place = mask.index_select(dim, own_indices), place.index_select(dim, own_indices)
    return torch.where(mask, source.flatten()[place], input)


def strided(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`as_strided` of a tensor that is contiguous in the trace; on this rank it may not be, after a conversion."""
    return _strided(target, ctx, *args, **kwargs)


def _strided(
    target: Any,
    ctx: LocalContext,
    input: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    input = input.contiguous()
    strides, start = on_part(ctx.input_shapes[0], input.shape, stride, storage_offset or 0)
    return target(input, ctx.local_shape(), strides, input.storage_offset() + start)


def groups(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """A grouped convolution on a shard of its channels, which holds its part of the groups."""
    channels = 1 + len(ctx.shapes[0]) - max(map(len, ctx.input_shapes))  # a weight has as many dims as a batch; else 0
    pieces = ctx.pieces(ctx.outputs[0], channels)
    if "groups" in kwargs:
        return target(*args, **{**kwargs, "groups": kwargs["groups"] // pieces})
    place = 6  # position of `groups` in the signatures of all convolutions
    return target(*args[:place], args[place] // pieces, *args[place + 1 :], **kwargs)
