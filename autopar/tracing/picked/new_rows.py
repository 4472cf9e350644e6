"""Tensors that are made with as many rows as a mask picks: `torch.ones(rows.shape[0])`, `torch.arange(len(rows))`,
`negatives.expand(len(rows), -1)`."""

from __future__ import annotations

from typing import Any

import torch

from autopar.tracing.picked.picked_rows import FILLED, ROW_NUMBERS, PickedRows, RowMask
from autopar.tracing.picked.trace_masks import TraceMasks

Tensor = torch.Tensor
_REPEATING = (Tensor.expand, Tensor.repeat)
_OF_SIZES = {torch.ones: 0, torch.zeros: 0, torch.empty: 0, torch.full: 0} | {
    getattr(Tensor, name): 1 for name in ("new_ones", "new_zeros", "new_empty", "new_full")
}


def create_as_many_rows(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As many rows as are picked, if the first size is their number; NotImplemented for any other call."""
    if func is torch.arange:
        return _row_numbers(trace_masks, *args, **kwargs)
    if func in _REPEATING:
        return NotImplemented if kwargs else _repeated(trace_masks, func, *args)
    if func not in _OF_SIZES:
        return NotImplemented
    before, sizes = args[: _OF_SIZES[func]], args[_OF_SIZES[func] :]
    behind: tuple[Any, ...] = ()
    if sizes and isinstance(sizes[0], (tuple, list)):
        sizes, behind = tuple(sizes[0]), sizes[1:]
    elif not sizes and isinstance(kwargs.get("size"), (tuple, list)):
        sizes, kwargs = tuple(kwargs["size"]), {key: value for key, value in kwargs.items() if key != "size"}
    row_mask = _mask_counted_by(trace_masks, sizes[0] if sizes else None)
    if row_mask is None:
        return NotImplemented
    with trace_masks.recorder.on():
        return PickedRows(
            row_mask, func(*before, (row_mask.flat_mask.shape[0], *sizes[1:]), *behind, **kwargs), unpicked_hold=FILLED
        )


def _repeated(trace_masks: TraceMasks, func: Any, values: Tensor, *given: Any) -> Any:
    """A tensor that is the same for all picked rows."""
    sizes = tuple(given[0]) if given and isinstance(given[0], (tuple, list)) else given
    row_mask = _mask_counted_by(trace_masks, sizes[0] if sizes else None)
    has_one_row = values.ndim < len(sizes) or (values.ndim == len(sizes) and values.shape[0] == 1)
    if row_mask is None or not has_one_row:
        return NotImplemented
    with trace_masks.recorder.on():
        return PickedRows(row_mask, func(values, (row_mask.flat_mask.shape[0], *sizes[1:])))


def _mask_counted_by(trace_masks: TraceMasks, number: Any) -> RowMask | None:
    """The mask of which this is the number of picked rows."""
    return next(
        (
            row_mask
            for row_mask in trace_masks.masks
            if row_mask.asked_number is not None and row_mask.asked_number is number
        ),
        None,
    )


def _row_numbers(trace_masks: TraceMasks, *ends: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """The index of each row among the picked ones."""
    ends = ends or (kwargs.pop("end", None),)
    from_zero = len(ends) == 1 or (len(ends) == 2 and type(ends[0]) is int and ends[0] == 0)
    row_mask = _mask_counted_by(trace_masks, ends[-1]) if from_zero else None
    if row_mask is None or kwargs.keys() - {"device"}:
        return NotImplemented
    with trace_masks.recorder.on():
        numbers = (row_mask.flat_mask.cumsum(0) - 1).clamp(min=0)
        return PickedRows(row_mask, numbers if dtype is None else numbers.to(dtype), indices_of=ROW_NUMBERS)
