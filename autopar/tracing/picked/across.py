"""Picked rows that lie along another dim than the first: `x[:, mask]`, `edge_index[:, kept]`, `rows.T`.

For ops that treat each row by itself, or reduce over all rows, the row dim is moved to the front, and dims that the
call names are renumbered accordingly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.picked import products
from autopar.tracing.picked.harmless import IN_PLACE
from autopar.tracing.picked.picked_rows import (
    ALL_DIMS,
    FILLED,
    HARMLESS,
    PickedRows,
    RowMask,
    filled,
    is_plain,
    picked_rows_in,
)
from autopar.tracing.picked.rows import ALONG, is_elementwise, run
from autopar.tracing.picked.sums import LOSSES
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.picked.views import all_in_a_row
from autopar.tracing.picked.writes import changed
from autopar.tracing.pointwise import plain_name
from autopar.tracing.targets import getter, writes_its_first

Tensor = torch.Tensor
_WHOLE = slice(None)
_TURNS = ("t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis")
_OF_THE_LAST = ("linear", "matmul", "layer_norm", "rms_norm", "one_hot")  # ops along the last dim only
_OF_CLASSES = ("cross_entropy", "nll_loss", "multi_margin_loss", "cosine_embedding_loss")


def picked_by_index(trace_masks: TraceMasks, values: Tensor, parts: tuple[Any, ...], place: int) -> PickedRows | None:
    """What an index of slices, numbers and one mask picks, the mask applied last; None if it does not fit `values`."""
    row_dim_and_index = located(values, parts, place)
    if row_dim_and_index is None:
        return None
    row_dim, basic = row_dim_and_index
    row_mask = trace_masks.of(parts[place])
    if basic is not None:
        with trace_masks.recorder.on():
            values = values[basic]
    return row_mask.rows_of(values) if not row_dim else picked_along(row_mask, values, row_dim)


def located(values: Tensor, parts: tuple[Any, ...], place: int) -> tuple[int, tuple[Any, ...] | None] | None:
    """The dim along which the picked rows of an index lie, and the index with the mask's dims whole (None if nothing
    else is indexed). None if the index does not fit."""
    mask = parts[place]
    others = [*parts[:place], *parts[place + 1 :]]
    gap = values.ndim - mask.ndim - sum(part is not None and part is not Ellipsis for part in others)
    if gap < 0 or sum(part is Ellipsis for part in others) > 1:
        return None
    before: list[Any] = []
    for part in parts[:place]:
        before += [_WHOLE] * gap if part is Ellipsis else [part]
    start = sum(part is not None for part in before)
    if values.shape[start : start + mask.ndim] != mask.shape:
        return None
    row_dim = sum(part is None or isinstance(part, slice) for part in before)
    are_whole = all(isinstance(part, slice) and part == _WHOLE for part in (*before, *parts[place + 1 :]))
    return row_dim, None if are_whole else (*before, *[_WHOLE] * mask.ndim, *parts[place + 1 :])


def picked_along(row_mask: RowMask, values: Tensor, row_dim: int) -> PickedRows:
    """What is picked of a tensor whose dims from `row_dim` on are those of the mask."""
    with row_mask.recorder.on():
        number = HARMLESS if values.is_floating_point() or values.is_complex() else 0
        all_rows = filled(values, row_mask.complement, number, row_dim).flatten(
            row_dim, row_dim + row_mask.mask.ndim - 1
        )
    return with_row_dim(PickedRows(row_mask, all_rows, unpicked_hold=FILLED), row_dim)


def with_row_dim(result: Any, row_dim: int) -> Any:
    """The same rows (or all rows in a structure), marked as lying along dim `row_dim`."""
    for picked in picked_rows_in(result):
        picked.row_dim = row_dim
    return result


def record_along_other_dim(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result, NotImplemented for rows along the first dim, or UnknownDataError for what is not supported."""
    operands = picked_rows_in((args, kwargs))
    name = plain_name(func)
    first = operands[0]
    if len(operands) == 1 and args and first is args[0] and (order := _order(func, name, first, args[1:], kwargs)):
        with trace_masks.recorder.on():
            turned = first.values.permute(order)
        return with_row_dim(
            PickedRows(first.row_mask, turned, first.indices_of, first.unpicked_hold), order.index(first.row_dim)
        )
    for record in (products.record_concatenation, products.record_stack, products.record_product):
        result = record(trace_masks, func, args, kwargs)
        if result is not NotImplemented:
            return result
    if not any(rows.row_dim for rows in operands) or (func is Tensor.__setitem__ and first is not args[0]):
        return NotImplemented
    result = NotImplemented
    are_alike = all(rows.row_mask is first.row_mask and _reach(rows) == _reach(first) for rows in operands)
    if args and args[0] is first and (func.__name__ in IN_PLACE or writes_its_first(func)):
        are_alike = are_alike and all(rows.values.ndim <= first.values.ndim for rows in operands)
        result = (
            changed(trace_masks, func, args, kwargs) if are_alike and _fit(operands, args, kwargs) else NotImplemented
        )
    elif are_alike and not writes_its_first(func):
        result = _of_one_mask(trace_masks, func, name, first, args, kwargs)
    if result is NotImplemented:
        raise first.unknown(name)
    return result


def _of_one_mask(trace_masks: TraceMasks, func: Any, name: str, first: PickedRows, args: Any, kwargs: Any) -> Any:
    """The result of a call with rows of one mask along dim `row_dim`; NotImplemented where it is not supported."""
    row_dim, values, operands = first.row_dim, first.values, picked_rows_in((args, kwargs))
    if name == "size" and len(args) + len(kwargs) <= 2:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return first.shape if dim is None else first.shape[dim]
    if name in ("numel", "nelement"):
        return first.row_mask.number * (values.numel() // values.shape[row_dim])
    if is_elementwise(name, args, kwargs):
        if not _fit(operands, args, kwargs):
            return NotImplemented
        return with_row_dim(
            run(trace_masks, first.row_mask, func, args, kwargs), max(rows.row_dim for rows in operands)
        )
    if func in LOSSES and name not in _OF_CLASSES:
        plain = [rows for rows in pytree.tree_leaves((args, kwargs)) if is_plain(rows) and rows.ndim]
        if plain or any(rows.values.ndim != values.ndim for rows in operands):
            return NotImplemented
        return _back(trace_masks.record_call(func, *_turned((args, kwargs))), row_dim)
    if len(operands) > 1 or not args or first is not args[0]:
        return NotImplemented
    if name in _OF_THE_LAST and row_dim < values.ndim - (name != "one_hot"):
        return _back(trace_masks.record_call(func, (first_rows(first), *args[1:]), kwargs), row_dim)
    if name == "getitem":
        return _indexed(trace_masks, first, args[1])
    if name in ("view", "reshape", "flatten"):
        return _in_a_row(trace_masks, name, first, args[1:], kwargs)
    if name in ALONG:
        return _along(trace_masks, func, name, first, args, kwargs)
    return NotImplemented


def first_rows(rows: PickedRows) -> PickedRows:
    """The same rows, moved to the first dim."""
    with rows.row_mask.recorder.on():
        return (
            PickedRows(rows.row_mask, rows.values.movedim(rows.row_dim, 0), rows.indices_of, rows.unpicked_hold)
            if rows.row_dim
            else rows
        )


def _turned(value: Any) -> Any:
    return pytree.tree_map_only(PickedRows, first_rows, value)


def _back(value: Any, row_dim: int) -> Any:
    """Rows along the first dim, moved back to dim `row_dim`."""
    for rows in picked_rows_in(value) if row_dim else []:
        with rows.row_mask.recorder.on():
            moved = rows.values.movedim(0, row_dim)
        rows.__init__(rows.row_mask, moved, rows.indices_of, rows.unpicked_hold)  # type: ignore[misc]
    return with_row_dim(value, row_dim)


def _along(trace_masks: TraceMasks, func: Any, name: str, first: PickedRows, args: Any, kwargs: Any) -> Any:
    """An op along named dims, or over all."""
    row_dim, rank = first.row_dim, first.values.ndim
    place, default = ALONG[name]
    along = args[place] if len(args) > place else kwargs.get("dim", default)
    dims = along if isinstance(along, (tuple, list)) else (along,)
    if along is None:
        return trace_masks.record_call(func, (first_rows(first), *args[1:]), kwargs)
    if name == "unsqueeze" or not all(type(dim) is int and -rank <= dim < rank for dim in dims):
        return NotImplemented
    behind = args[place + 1] if len(args) > place + 1 and name not in ("select", "narrow") else False
    keeps = kwargs.get("keepdim", behind)
    dims = [dim % rank for dim in dims]
    if row_dim in dims and keeps is not False:
        return NotImplemented
    moved_dims = [0 if dim == row_dim else dim + 1 if dim < row_dim else dim for dim in dims]
    named = moved_dims if isinstance(along, (tuple, list)) else moved_dims[0]
    arguments = (first_rows(first), *args[1:place], named, *args[place + 1 :])
    result = trace_masks.record_call(func, arguments, {key: value for key, value in kwargs.items() if key != "dim"})
    remaining = picked_rows_in(result)
    removed = sum(dim < row_dim for dim in dims) if remaining and remaining[0].values.ndim < rank else 0
    return _back(result, row_dim - removed)


def _order(func: Any, name: str, first: PickedRows, arguments: Any, kwargs: Any) -> list[int] | None:
    """The order of dims that a transposing call gives; None for other calls, and if the rows stay in front."""
    rank = first.values.ndim
    order = list(range(rank))
    if func == getter("T") or (name == "t" and rank <= 2):
        order.reverse()
    elif func == getter("mT") and rank >= 2:
        order[-2:] = order[:-3:-1]
    elif name not in _TURNS or kwargs or not all(isinstance(d, (int, tuple, list)) for d in arguments):
        return None
    elif name == "permute":
        order = [
            d % rank for d in (arguments[0] if len(arguments) == 1 and not isinstance(arguments[0], int) else arguments)
        ]
    elif len(arguments) != 2 or not all(isinstance(d, int) for d in arguments):
        return None
    elif name in ("movedim", "moveaxis"):
        order.insert(arguments[1] % rank, order.pop(arguments[0] % rank))
    else:
        a, b = (d % rank for d in arguments)
        order[a], order[b] = order[b], order[a]
    return order if len(order) == rank and (first.row_dim or order.index(0)) else None


def _reach(rows: PickedRows) -> int:
    """The number of dims from that of the rows to the last, both included."""
    return rows.values.ndim - rows.row_dim


def _fit(operands: list[PickedRows], args: Any, kwargs: Any) -> bool:
    """Whether operands broadcast with all rows as with the picked ones, with the row dim counted from the end."""
    rank, reach = max(operand.values.ndim for operand in operands), _reach(operands[0])
    others = [operand for operand in pytree.tree_leaves((args, kwargs)) if is_plain(operand)]
    return all(operand.ndim <= rank and (operand.ndim < reach or operand.shape[-reach] == 1) for operand in others)


def _indexed(trace_masks: TraceMasks, first: PickedRows, index: Any) -> Any:
    """A part of each row: `edge_index[0]`."""
    parts = index if isinstance(index, tuple) else (index,)
    masks = [part for part in parts if isinstance(part, PickedRows)]
    if masks:
        again = masks[0].values
        is_last = (
            len(parts) == first.row_dim + 1 and parts[-1] is masks[0] and all(part == _WHOLE for part in parts[:-1])
        )
        if not is_last or again.dtype != torch.bool or again.ndim != 1:
            return NotImplemented
        with trace_masks.recorder.on():
            mask = first.row_mask.flat_mask & again
        return picked_along(trace_masks.of(mask), first.values, first.row_dim)
    if not all(part is None or part is Ellipsis or isinstance(part, (slice, int)) for part in parts):
        return NotImplemented
    gap = first.values.ndim - sum(part is not None and part is not Ellipsis for part in parts)
    spread: list[Any] = []
    for part in (*parts, Ellipsis) if not any(part is Ellipsis for part in parts) else parts:
        spread += [_WHOLE] * gap if part is Ellipsis else [part]
    own = [place for place, part in enumerate(spread) if part is not None]
    if gap < 0 or len(own) != first.values.ndim or spread[own[first.row_dim]] != _WHOLE:
        return NotImplemented
    row_dim = sum(part is None or isinstance(part, slice) for part in spread[: own[first.row_dim]])
    result = run(trace_masks, first.row_mask, Tensor.__getitem__, (first, tuple(spread)), {})
    if first.indices_of == ALL_DIMS and len(spread) == 2 and isinstance(spread[0], int):
        result.indices_of = spread[0] % len(first.values)
    return with_row_dim(result, row_dim)


def _in_a_row(trace_masks: TraceMasks, name: str, first: PickedRows, arguments: Any, kwargs: Any) -> Any:
    """Flattened dims up to that of the rows, `x[:, mask].flatten(0, 1)`: rows of all leading indices in sequence."""
    row_dim, sizes = first.row_dim, first.values.shape
    behind = list(sizes[row_dim + 1 :])
    if name == "flatten":
        dims = dict(zip(("start_dim", "end_dim"), arguments, strict=False)) | kwargs
        if dims.get("start_dim", 0) != 0 or dims.get("end_dim", -1) % len(sizes) not in (row_dim, len(sizes) - 1):
            return NotImplemented
        row_shape = behind if dims.get("end_dim", -1) % len(sizes) == row_dim else []
    else:
        sizes_asked = (
            list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else list(arguments)
        )
        if (
            kwargs
            or not sizes_asked
            or not all(type(size) is int or isinstance(size, int) for size in sizes_asked)
            or sizes_asked[0] != -1
        ):
            return NotImplemented
        row_shape = sizes_asked[1:]
    if row_shape and math.prod(row_shape) != math.prod(behind):
        return NotImplemented
    return all_in_a_row(trace_masks, first, row_shape, whole=not row_shape)
