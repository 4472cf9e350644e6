"""Writes to the place where rows were picked (`x[mask] = y[mask]`, `x[mask] += 1`), and writes into picked rows."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph import storage_of
from autopar.tracing.picked.harmless import IN_PLACE, harmless_operands, meaning, unpicked_hold_after
from autopar.tracing.picked.picked_rows import (
    FILLED,
    FINITE,
    HARMLESS,
    PickedRows,
    fill_unpicked,
    is_plain,
    picked_rows_in,
)
from autopar.tracing.picked.rows import fit, intersection
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import is_pointwise
from autopar.tracing.targets import writes_its_first

Tensor = torch.Tensor


def record_write(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The written tensor (None for `__setitem__`), with the write in the graph; NotImplemented for any other call."""
    if func is Tensor.__setitem__ and isinstance(args[0], PickedRows):
        return _set(trace_masks, *args)
    if isinstance(args[0] if args else None, PickedRows) and (func.__name__ in IN_PLACE or writes_its_first(func)):
        return (
            changed(trace_masks, func, args, kwargs)
            if fit(picked_rows_in((args, kwargs)), args, kwargs)
            else NotImplemented
        )
    if func is not Tensor.__setitem__ or not is_plain(args[0]):
        return NotImplemented
    written, index, value = args
    row_mask = _row_mask_of(trace_masks, index)
    if row_mask is None or written.shape[: row_mask.mask.ndim] != row_mask.mask.shape:
        return NotImplemented
    mask = row_mask.mask
    inner_shape = written.shape[mask.ndim :]
    with trace_masks.recorder.on():
        if isinstance(value, PickedRows):
            if value.row_mask is not row_mask or value.row_dim or value.values.ndim != 1 + len(inner_shape):
                return NotImplemented
            value = value.values.reshape((*mask.shape, *value.values.shape[1:])).to(written.dtype)
        elif is_plain(value) and value.ndim > len(inner_shape):
            return NotImplemented
        shown = mask[(..., *[None] * len(inner_shape))] if inner_shape else mask
        written.copy_(torch.where(shown, value, written))
    return None


def changed(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In-place pointwise ops on picked rows: `rows += 1`, `rows.mul_(v)`. All rows are written."""
    rows, others = args[0], args[1:]
    name = meaning(func, args)
    operands = picked_rows_in((args, kwargs))
    least = FINITE if unpicked_hold_after(name, operands) == FINITE else FILLED  # old values stay in the autograd graph
    is_like = rows.values.ndim == max(operand.values.ndim for operand in operands)
    is_finite = rows.unpicked_hold >= least or (least == FINITE and not rows.values.is_floating_point())
    if any(operand.row_mask is not rows.row_mask for operand in operands) or not is_pointwise(name):
        return NotImplemented
    if not is_like or storage_of(rows.values) in trace_masks.maybe_shared:
        return NotImplemented
    if not is_finite:
        filled = fill_unpicked(rows, HARMLESS if rows.values.is_floating_point() else 1)
        with trace_masks.recorder.on():
            rows.values.copy_(filled)
    shown, named = harmless_operands(name, (others, kwargs))
    with trace_masks.recorder.on():
        func(rows.values, *shown, **named)
    rows.written(unpicked_hold_after(name, operands))
    return rows


def _set(trace_masks: TraceMasks, rows: PickedRows, index: Any, value: Any) -> Any:
    """`rows[wide] = widths[wide]` with a mask of the rows, and `rows[:, 0] = v`."""
    parts = index if isinstance(index, tuple) else (index,)
    row_mask, values = rows.row_mask, rows.values
    if storage_of(values) in trace_masks.maybe_shared:
        return NotImplemented
    unpicked_hold = (
        min(rows.unpicked_hold, value.unpicked_hold)
        if isinstance(value, PickedRows)
        else min(rows.unpicked_hold, FINITE)
    )
    if len(parts) == 1 and isinstance(parts[0], PickedRows):
        again = parts[0].values
        if parts[0].row_mask is not row_mask or again.dtype != torch.bool or again.ndim > values.ndim:
            return NotImplemented
        mask, rank = intersection(row_mask, again), values.ndim - again.ndim + 1
        with trace_masks.recorder.on():
            if isinstance(value, PickedRows):
                if value.row_mask is not trace_masks.of(mask) or value.values.ndim != rank:
                    return NotImplemented
                value = value.values.reshape((*mask.shape, *value.values.shape[1:])).to(values.dtype)
            elif is_plain(value) and value.ndim >= rank:
                return NotImplemented
            values.copy_(torch.where(mask[(..., *[None] * (rank - 1))], value, values))
        rows.written(unpicked_hold)
        return None
    are_slices = all(isinstance(index_part, (slice, int)) or index_part is Ellipsis for index_part in parts)
    if not are_slices or not (parts[0] is Ellipsis or (isinstance(parts[0], slice) and parts[0] == slice(None))):
        return NotImplemented
    if parts[0] is Ellipsis and len(parts) > values.ndim:
        return NotImplemented
    with trace_masks.recorder.on():
        part = values[parts]
        if isinstance(value, PickedRows) and (value.row_mask is not row_mask or value.values.ndim != part.ndim):
            return NotImplemented
        if is_plain(value) and value.ndim >= part.ndim:
            return NotImplemented
        part.copy_(value.values) if isinstance(value, PickedRows) else part.copy_(torch.as_tensor(value))
    rows.written(unpicked_hold)
    return None


def _row_mask_of(trace_masks: TraceMasks, index: Any) -> Any:
    """The row mask of a mask used as an index, or of the indices of a mask's elements."""
    if is_plain(index) and index.dtype == torch.bool and index.ndim:
        return trace_masks.of(index)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, PickedRows) for part in parts):
        return None
    row_mask = parts[0].row_mask
    dims = [part.indices_of for part in parts]
    are_all_dims = all(part.row_mask is row_mask for part in parts) and dims == list(range(row_mask.mask.ndim))
    return row_mask if are_all_dims else None
