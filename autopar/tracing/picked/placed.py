"""Picked rows as indices: `y[:, mask] = x[:, mask]`, `y[mask, classes[mask]] = 1`, `y[kept] = v`, sums by index.

In sums, rows that are not picked are added as zeros; in writes, they go to an extra row at the end, which is cut off.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.tracing.picked.across import located
from autopar.tracing.picked.harmless import harmless_operands
from autopar.tracing.picked.picked_rows import PickedRows, fill_unpicked, is_plain
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.picked.views import unexpanded_mask
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_WHOLE = slice(None)
_ADDING = {"index_add": "source", "scatter_add": "src"}


def record_at_indices(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sums or the written tensor (None for `__setitem__`); NotImplemented for any other call."""
    first = args[0] if args else None
    if func is Tensor.__setitem__ and is_plain(first):
        return _written(trace_masks, first, args[1], args[2])
    name = plain_name(func)
    in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
    if name == "bincount":
        return _counted(trace_masks, *args, **kwargs)
    if not is_plain(first):
        return NotImplemented
    if name in _ADDING:
        return _added(trace_masks, func, _ADDING[name], args, kwargs)
    if name == "masked_scatter" and len(args) == 3 and not kwargs:
        return _in_order(trace_masks, func, *args)
    if name in ("scatter", "scatter_reduce"):
        return _scattered(trace_masks, name, in_place, args, kwargs)
    return NotImplemented


def _added(trace_masks: TraceMasks, func: Any, key: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`index_add` or `scatter_add` of picked rows at picked indices."""
    named = dict(zip(("self", "dim", "index", key), args, strict=False)) | kwargs
    index, source, dim = named.get("index"), named.get(key), named.get("dim")
    if (
        not isinstance(index, PickedRows)
        or not isinstance(source, PickedRows)
        or type(dim) is not int
        or len(named) > 4
    ):
        return NotImplemented
    rank = source.values.ndim
    along = dim % rank == source.row_dim and (
        index.row_dim == source.row_dim if index.values.ndim == rank else index.values.ndim == 1
    )
    if index.row_mask is not source.row_mask or not along or named["self"].ndim != rank:
        return NotImplemented
    places, added = fill_unpicked(index, 0), fill_unpicked(source, 0)
    with trace_masks.recorder.on():
        return func(named["self"], dim, places, added)


def _in_order(trace_masks: TraceMasks, func: Any, target: Tensor, mask: Any, rows: Any) -> Any:
    """`masked_scatter` of rows that the same mask has picked: each returns to its own place."""
    if isinstance(mask, PickedRows) or not isinstance(rows, PickedRows) or rows.row_dim:
        return NotImplemented
    with trace_masks.recorder.on():
        shown = mask if mask.shape == target.shape else mask.expand(target.shape)
        row_mask: Any = trace_masks.of(shown)
        if rows.values.ndim > 1:
            row_mask = unexpanded_mask(trace_masks, row_mask, math.prod(rows.values.shape[1:]))
        if row_mask is not rows.row_mask:
            return NotImplemented
        placed = torch.where(shown, rows.values.reshape(target.shape).to(target.dtype), target)
        return target.copy_(placed) if func is Tensor.masked_scatter_ else placed


def _counted(trace_masks: TraceMasks, values: Any, weights: Any = None, minlength: int = 0) -> Any:
    """`bincount` of picked values."""
    if not isinstance(values, PickedRows) or (weights is not None and not isinstance(weights, PickedRows)):
        return NotImplemented
    if weights is not None and weights.row_mask is not values.row_mask:
        return NotImplemented
    places = fill_unpicked(values, 0)
    each = fill_unpicked(weights, 0) if weights is not None else None
    with trace_masks.recorder.on():
        counts = torch.bincount(places, values.row_mask.flat_mask.double() if each is None else each, minlength)
        return counts.long() if each is None else counts


def _scattered(trace_masks: TraceMasks, name: str, in_place: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    """`scatter` or `scatter_reduce` at picked indices."""
    names = ("self", "dim", "index", "value" if "value" in kwargs else "src", "reduce")
    named = dict(zip(names, args, strict=False)) | kwargs
    target, dim, index = named.pop("self"), named.pop("dim", None), named.pop("index", None)
    key = "value" if "value" in named else "src"
    source = named.pop(key, None)
    if not isinstance(index, PickedRows) or type(dim) is not int or index.values.ndim != target.ndim:
        return NotImplemented
    is_alike = isinstance(source, PickedRows) and source.row_mask is index.row_mask and source.row_dim == index.row_dim
    if dim % target.ndim != index.row_dim or not (is_alike or isinstance(source, (int, float))):
        return NotImplemented
    shown = harmless_operands("matmul", source) if isinstance(source, PickedRows) else source
    with trace_masks.recorder.on():
        size = target.shape[dim]
        padded = torch.cat([target, torch.zeros_like(target.narrow(dim, 0, 1))], dim)
        scattered = getattr(Tensor, name)(padded, dim, fill_unpicked(index, size), shown, **named).narrow(dim, 0, size)
        return target.copy_(scattered) if in_place else scattered


def _written(trace_masks: TraceMasks, target: Tensor, index: Any, value: Any) -> Any:
    """`target[index] = value`, where picked rows are in the index."""
    parts = index if isinstance(index, tuple) else (index,)
    while len(parts) > 1 and isinstance(parts[-1], slice) and parts[-1] == _WHOLE:
        parts = parts[:-1]
    picked = [part for part in parts if isinstance(part, PickedRows)]
    masks = [n for n, part in enumerate(parts) if is_plain(part) and part.dtype == torch.bool and part.ndim]
    if not picked:
        return _masked_at(trace_masks, target, parts, masks[0], value) if len(masks) == 1 else NotImplemented
    column = picked[-1]
    row_mask, rank = column.row_mask, column.row_mask.mask.ndim
    if any(part.row_mask is not row_mask or part.row_dim for part in picked) or not _is_value(
        value, row_mask, target.ndim - len(parts)
    ):
        return NotImplemented
    first_mask = parts[0] if masks == [0] else None
    by_mask = len(parts) == 2 and first_mask is not None and trace_masks.of(first_mask) is row_mask
    by_places = [part.indices_of for part in picked[:-1]] == list(range(rank)) and len(parts) == len(picked) == rank + 1
    if (by_mask or by_places) and target.ndim == rank + 1 and target.shape[:rank] == row_mask.mask.shape:
        return _into_columns(trace_masks, target, column, value)
    if len(parts) == 1 and column.values.ndim == 1 and not column.values.is_floating_point():
        return _into_rows(trace_masks, target, column, value)
    return NotImplemented


def _is_value(value: Any, row_mask: Any, trailing: int) -> bool:
    if isinstance(value, PickedRows):
        return value.row_mask is row_mask and not value.row_dim and value.values.ndim <= trailing + 1
    return not is_plain(value) or value.ndim <= max(trailing, 0)


def _masked_at(trace_masks: TraceMasks, target: Tensor, parts: Any, place: int, value: Any) -> Any:
    """`y[:, mask] = rows`, where the rows lie along the same dim."""
    row_dim_and_index = located(target, parts, place)
    if row_dim_and_index is None or not isinstance(value, PickedRows):
        return NotImplemented
    row_dim, basic = row_dim_and_index
    mask, row_mask = parts[place], trace_masks.of(parts[place])
    with trace_masks.recorder.on():
        shown = target if basic is None else target[basic]
        if (
            value.row_mask is not row_mask
            or value.row_dim != row_dim
            or value.values.ndim != shown.ndim - mask.ndim + 1
        ):
            return NotImplemented
        rows = value.values.unflatten(row_dim, mask.shape) if mask.ndim > 1 else value.values
        trailing = shown.ndim - row_dim - mask.ndim
        shown.copy_(torch.where(mask[(..., *[None] * trailing)] if trailing else mask, rows.to(target.dtype), shown))
    return None


def _into_columns(trace_masks: TraceMasks, target: Tensor, column: PickedRows, value: Any) -> None:
    """`y[mask, classes] = 1`: one element of each row."""
    row_mask = column.row_mask
    with trace_masks.recorder.on():
        length = target.shape[-1]
        number = harmless_operands("gather", column)
        number = torch.where(number < 0, number + length, number)
        is_there = row_mask.flat_mask[:, None] & (torch.arange(length, device=number.device) == number[:, None])
        shown = value
        if isinstance(value, PickedRows):
            shown = value.values.to(target.dtype)[:, None] if value.values.ndim else value.values
        rows = torch.where(is_there, shown, target.flatten(0, -2))
        target.copy_(rows.reshape(target.shape))


def _into_rows(trace_masks: TraceMasks, target: Tensor, places: PickedRows, value: Any) -> None:
    """`y[places] = v`: whole rows at given indices."""
    with trace_masks.recorder.on():
        size = target.shape[0]
        number = fill_unpicked(places, size)
        number = torch.where(number < 0, number + size, number)
        shown = harmless_operands("matmul", value) if isinstance(value, PickedRows) else value
        padded = torch.cat([target, torch.zeros_like(target[:1])])
        padded[number] = shown.to(target.dtype) if is_plain(shown) else shown
        target.copy_(padded[:size])
