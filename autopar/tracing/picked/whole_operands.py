"""Whole tensors that have as many rows as are picked: `F.cross_entropy(logits[mask], labels)`, `x[mask] + features`.

The k-th row of such a tensor belongs to the k-th picked row. If their numbers differ, which eager mode refuses, the
indices that are read exceed the last row: an error when the model runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.picked.picked_rows import PickedRows, RowMask, is_plain, picked_rows_in
from autopar.tracing.picked.rows import is_elementwise
from autopar.tracing.picked.sums import LOSSES, OF_ROWS
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_BROADCAST = ("weight", "pos_weight")  # arguments of losses that broadcast over rows


def pair_with_whole_tensors(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with such tensors replaced by picked rows; NotImplemented if there are none."""
    operands, name = picked_rows_in((args, kwargs)), plain_name(func)
    row_mask, rank = operands[0].row_mask, max(operand.values.ndim for operand in operands)
    if any(operand.row_mask is not row_mask or operand.row_dim for operand in operands) or not (
        func in LOSSES or is_elementwise(name, args, kwargs)
    ):
        return NotImplemented
    least = 1 if func in OF_ROWS else rank

    def is_as_many(operand: Any) -> bool:
        return is_plain(operand) and least <= operand.ndim <= rank and operand.shape[0] != 1

    fixed = {key: value for key, value in kwargs.items() if key in _BROADCAST}
    others = {key: value for key, value in kwargs.items() if key not in _BROADCAST}
    if func in LOSSES and any(is_plain(operand) for operand in args[2:]):
        return NotImplemented
    if not any(is_as_many(operand) for operand in pytree.tree_leaves((args, others))):
        return NotImplemented
    args, others = pytree.tree_map(
        lambda operand: _rows(trace_masks, row_mask, operand) if is_as_many(operand) else operand, (args, others)
    )
    return trace_masks.record_call(func, args, {**others, **fixed})


def _rows(trace_masks: TraceMasks, row_mask: RowMask, values: Tensor) -> PickedRows:
    """The rows of a whole tensor, each placed at the row that it belongs to."""
    count = values.shape[0]
    with trace_masks.recorder.on():
        place = (row_mask.flat_mask.cumsum(0) - 1).masked_fill(row_mask.flat_complement, 0)
        place = torch.where(row_mask.count == count, place, count)
        return PickedRows(row_mask, values[place])
