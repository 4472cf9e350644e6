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
    met = [one for one in parts if isinstance(one, PickedRows)]
    row_dim, rank = (met[0].row_dim, met[0].values.ndim) if met else (0, 0)
    if type(dim) is not int or not met or dim % rank != row_dim or kwargs.keys() - {"dim"}:
        return NotImplemented
    values = [one.values if isinstance(one, PickedRows) else one for one in parts]
    if any(one.row_dim != row_dim for one in met) or any(one.ndim != rank for one in values):
        return NotImplemented
    key = ("cat", *(one.row_mask if isinstance(one, PickedRows) else int(one.shape[row_dim]) for one in parts))
    with trace_masks.recorder.on():
        if key not in trace_masks.derived:
            row_mask = trace_masks.derived[key] = trace_masks.of(torch.cat([_mask(one, row_dim) for one in parts]))
            row_mask.min_count = sum(
                one.row_mask.min_count if isinstance(one, PickedRows) else int(one.shape[row_dim]) for one in parts
            )
        made = PickedRows(
            trace_masks.derived[key], torch.cat(values, row_dim), unpicked_hold=min(one.unpicked_hold for one in met)
        )
    made.row_dim = row_dim
    return made


def record_stack(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stacked rows of one mask, `torch.stack([source, target])`; NotImplemented for any other call."""
    if plain_name(func) != "stack" or not args or not isinstance(args[0], (tuple, list)):
        return NotImplemented
    parts = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first: Any = parts[0]
    if type(dim) is not int or not all(isinstance(one, PickedRows) for one in parts):
        return NotImplemented
    if any(
        one.row_mask is not first.row_mask or one.row_dim != first.row_dim or one.values.ndim != first.values.ndim
        for one in parts
    ):
        return NotImplemented
    with trace_masks.recorder.on():
        made = PickedRows(
            first.row_mask,
            torch.stack([one.values for one in parts], dim),
            unpicked_hold=min(one.unpicked_hold for one in parts),
        )
    made.row_dim = first.row_dim + (dim % made.values.ndim <= first.row_dim)
    return made


def _mask(one: Any, row_dim: int) -> Tensor:
    if isinstance(one, PickedRows):
        return one.row_mask.flat_mask
    return torch.ones(one.shape[row_dim], dtype=torch.bool, device=one.device)


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


def _is_open_to(trace_masks: TraceMasks, *met: PickedRows) -> bool:
    """Whether a product of rows may run on all rows: all are of one mask, which is also that of earlier products."""
    row_mask: RowMask = met[0].row_mask
    if any(one.row_mask is not row_mask for one in met) or trace_masks.multiplied_mask not in (None, row_mask):
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
    met = picked_rows_in(operands)
    if len(letters) != len(operands) or any(len(l) != _rank(one) for l, one in zip(letters, operands, strict=True)):
        return NotImplemented
    rows = {l[one.row_dim] for l, one in zip(letters, operands, strict=True) if isinstance(one, PickedRows)}
    row = rows.pop()
    held = [l.count(row) for l in letters]
    alike = held == [int(isinstance(one, PickedRows)) for one in operands]
    if rows or not alike or output.count(row) > 1 or not _is_open_to(trace_masks, *met):
        return NotImplemented
    keeps = row in output
    shown = [
        one if is_plain(one) else harmless_operands("matmul", one) if keeps else fill_unpicked(one, 0)
        for one in operands
    ]
    with trace_masks.recorder.on():
        made = torch.einsum(equation, *shown)
    if not keeps:
        return made
    kept = PickedRows(met[0].row_mask, made, unpicked_hold=1)
    kept.row_dim = output.index(row)
    return kept


def _rank(one: Any) -> int:
    return one.values.ndim if isinstance(one, PickedRows) else one.ndim
