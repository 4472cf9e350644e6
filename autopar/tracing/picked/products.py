"""Concatenated picked rows (`cat`), and products that sum over picked rows (`rows.T @ rows`, `einsum`)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.tracing.picked.harmless import harmless_operands
from autopar.tracing.picked.picked_rows import PickedRows, RowMask, fill_unpicked, is_plain, picked_rows_in
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_JOINING = ("cat", "concat", "concatenate")
_PRODUCTS = ("matmul", "mm", "mv", "dot", "rmatmul")


def record_concatenation(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenated rows of several masks, and whole tensors; NotImplemented for any other call."""
    if plain_name(func) not in _JOINING or not args or not isinstance(args[0], (tuple, list)):
        return NotImplemented
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    picked = [part for part in parts if isinstance(part, PickedRows)]
    row_dim, rank = (picked[0].row_dim, picked[0].values.ndim) if picked else (0, 0)
    if type(dim) is not int or not picked or dim % rank != row_dim or kwargs.keys() - {"dim"}:
        return NotImplemented
    values = [part.values if isinstance(part, PickedRows) else part for part in parts]
    if any(part.row_dim != row_dim for part in picked) or any(part.ndim != rank for part in values):
        return NotImplemented
    key = ("cat", *(part.row_mask if isinstance(part, PickedRows) else int(part.shape[row_dim]) for part in parts))
    with trace_masks.recorder.on():
        if key not in trace_masks.derived:
            row_mask = trace_masks.derived[key] = trace_masks.of(torch.cat([_mask(part, row_dim) for part in parts]))
            row_mask.min_count = sum(
                part.row_mask.min_count if isinstance(part, PickedRows) else int(part.shape[row_dim]) for part in parts
            )
        joined = PickedRows(
            trace_masks.derived[key],
            torch.cat(values, row_dim),
            unpicked_hold=min(part.unpicked_hold for part in picked),
        )
    joined.row_dim = row_dim
    return joined


def record_stack(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stacked rows of one mask, `torch.stack([source, target])`; NotImplemented for any other call."""
    if plain_name(func) != "stack" or not args or not isinstance(args[0], (tuple, list)):
        return NotImplemented
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first: Any = parts[0]
    if type(dim) is not int or not all(isinstance(part, PickedRows) for part in parts):
        return NotImplemented
    if any(
        part.row_mask is not first.row_mask or part.row_dim != first.row_dim or part.values.ndim != first.values.ndim
        for part in parts
    ):
        return NotImplemented
    with trace_masks.recorder.on():
        stacked = PickedRows(
            first.row_mask,
            torch.stack([part.values for part in parts], dim),
            unpicked_hold=min(part.unpicked_hold for part in parts),
        )
    stacked.row_dim = first.row_dim + (dim % stacked.values.ndim <= first.row_dim)
    return stacked


def _mask(part: Any, row_dim: int) -> Tensor:
    if isinstance(part, PickedRows):
        return part.row_mask.flat_mask
    return torch.ones(part.shape[row_dim], dtype=torch.bool, device=part.device)


def record_product(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product that sums over the rows, or keeps their dim; NotImplemented for others."""
    name = plain_name(func)
    if name == "einsum":
        return _einsum(trace_masks, *args, **kwargs)
    if name not in _PRODUCTS or len(args) != 2 or kwargs:
        return NotImplemented
    first, second = args[::-1] if name == "rmatmul" else args
    if not (isinstance(first, PickedRows) and isinstance(second, PickedRows)) or not _is_open_to(
        trace_masks, first, second
    ):
        return NotImplemented
    ranks = first.values.ndim, second.values.ndim
    if max(ranks) > 2 or first.row_dim != ranks[0] - 1 or second.row_dim:
        return NotImplemented
    left, right = fill_unpicked(first, 0), fill_unpicked(second, 0)
    with trace_masks.recorder.on():
        return left @ right


def _is_open_to(trace_masks: TraceMasks, *operands: PickedRows) -> bool:
    """Whether a product of rows may run on all rows: all are of one mask, which is also that of earlier products."""
    row_mask: RowMask = operands[0].row_mask
    if any(rows.row_mask is not row_mask for rows in operands) or trace_masks.multiplied_mask not in (None, row_mask):
        return False
    trace_masks.multiplied_mask = row_mask
    return True


def _einsum(trace_masks: TraceMasks, equation: Any, *operands: Any) -> Any:
    """An einsum of rows of one mask: the letter of the row dim is summed over, or kept in the output."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    picked = picked_rows_in(operands)
    if len(letters) != len(operands) or any(
        len(l) != _rank(operand) for l, operand in zip(letters, operands, strict=True)
    ):
        return NotImplemented
    rows = {l[operand.row_dim] for l, operand in zip(letters, operands, strict=True) if isinstance(operand, PickedRows)}
    row = rows.pop()
    occurrences = [l.count(row) for l in letters]
    are_alike = occurrences == [int(isinstance(operand, PickedRows)) for operand in operands]
    if rows or not are_alike or output.count(row) > 1 or not _is_open_to(trace_masks, *picked):
        return NotImplemented
    keeps = row in output
    shown = [
        operand if is_plain(operand) else harmless_operands("matmul", operand) if keeps else fill_unpicked(operand, 0)
        for operand in operands
    ]
    with trace_masks.recorder.on():
        result = torch.einsum(equation, *shown)
    if not keeps:
        return result
    rows_of_result = PickedRows(picked[0].row_mask, result, unpicked_hold=1)
    rows_of_result.row_dim = output.index(row)
    return rows_of_result


def _rank(operand: Any) -> int:
    return operand.values.ndim if isinstance(operand, PickedRows) else operand.ndim
