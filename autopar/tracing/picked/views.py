"""Other shapes of picked rows: flattened and back, expanded, flipped, and elements indexed in each row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.graph import VAL
from autopar.tracing.picked import new_rows
from autopar.tracing.picked.harmless import harmless_operands
from autopar.tracing.picked.picked_rows import ALL_DIMS, ROW_NUMBERS, PickedRows, RowMask, is_plain, picked_rows_in
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
_EXPANDING = ("expand", "expand_as")
_BY_ELEMENT = {
    "add",
    "mul",
    "or_",
    "and_",
    "xor",
    "invert",
    "gt",
    "ge",
    "ne",
    "logical_or",
    "logical_and",
    "logical_not",
}


def record_view(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result, or NotImplemented."""
    name = plain_name(func)
    if name == "getitem" and is_plain(args[0]):
        return _of_a_tensor(trace_masks, args[0], args[1])
    if name == "index_select" and len(args) == 3 and type(args[1]) is int and is_plain(args[0]):
        along = args[1] % args[0].ndim
        index = (*[slice(None)] * along, args[2]) if along else args[2]
        return trace_masks.record_call(Tensor.__getitem__, (args[0], index), {})
    if not args or not isinstance(args[0], PickedRows):
        return NotImplemented
    if name in _NEW and len(picked_rows_in((args, kwargs))) == 1:
        created = new_rows.create_as_many_rows(trace_masks, func, (args[0].values, *args[1:]), kwargs)
        with trace_masks.recorder.on():
            return func(args[0].values, *args[1:], **kwargs) if created is NotImplemented else created
    rows, arguments = args[0], args[1:]
    if name in ("view", "reshape", "flatten"):
        return _viewed(trace_masks, name, rows, arguments, kwargs)
    if (
        name == "squeeze"
        and not arguments
        and not kwargs
        and rows.indices_of == ALL_DIMS
        and rows.row_mask.mask.ndim == 1
    ):
        return rows.squeeze(1)  # the user expects more than one index, else dim 0 would go as well
    if kwargs:
        return NotImplemented
    if name == "getitem":
        return _of_each(trace_masks, rows, arguments[0])
    return _resized(trace_masks, func, name, rows, arguments)


def _resized(trace_masks: TraceMasks, func: Any, name: str, rows: PickedRows, arguments: Any) -> Any:
    """Rows that are expanded, repeated or flipped along dims within a row; NotImplemented for any other call."""
    sizes = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else arguments
    if name == "expand_as" and len(arguments) == 1 and isinstance(arguments[0], PickedRows):
        other = arguments[0]
        if other.row_mask is not rows.row_mask or other.values.ndim != rows.values.ndim or other.row_dim:
            return NotImplemented
        return _with_values(trace_masks, rows, lambda values: values.expand(other.values.shape))
    if not sizes or not all(isinstance(size, int) for size in sizes[1:]):
        return NotImplemented
    rank = rows.values.ndim
    if name in ("expand", "repeat", "tile") and len(sizes) == rank:
        is_count = rows.row_mask.asked_number is not None and sizes[0] is rows.row_mask.asked_number
        as_many = type(sizes[0]) is int and sizes[0] == (-1 if name == "expand" else 1)
        if not as_many and not (is_count and name == "expand"):
            return NotImplemented
        first = rows.values.shape[0] if name == "expand" else 1
        return _with_values(trace_masks, rows, lambda values: func(values, first, *sizes[1:]))
    if name in ("flip", "fliplr") and all(isinstance(size, int) and size % rank for size in sizes):
        return _with_values(trace_masks, rows, lambda values: func(values, *arguments))
    return NotImplemented


def _with_values(trace_masks: TraceMasks, rows: PickedRows, function: Any) -> PickedRows:
    with trace_masks.recorder.on():
        return PickedRows(rows.row_mask, function(rows.values), unpicked_hold=rows.unpicked_hold)


def _of_a_tensor(trace_masks: TraceMasks, values: Tensor, index: Any) -> Any:
    """A whole tensor indexed by picked indices, along one or several dims: `x[:, kept]`, `x[rows, classes]`."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(part is Ellipsis for part in parts) == 1:
        place = next(n for n, part in enumerate(parts) if part is Ellipsis)
        parts[place : place + 1] = [slice(None)] * (values.ndim - len(parts) + 1)
    picked = [part for part in parts if isinstance(part, PickedRows)]
    row_dim = next(n for n, part in enumerate(parts) if isinstance(part, PickedRows))
    plain = [*parts[:row_dim], *parts[row_dim + len(picked) :]]
    is_plain = all(part is None or isinstance(part, slice) for part in plain)
    if not is_plain or any(
        part.row_mask is not picked[0].row_mask
        or part.row_dim
        or part.values.ndim != 1
        or part.values.dtype == torch.bool
        for part in picked
    ):
        return NotImplemented
    if (
        not row_dim
        and all(isinstance(part, slice) and part == slice(None) for part in plain)
        and len(parts) > len(picked)
    ):
        return trace_masks.record_call(
            Tensor.__getitem__, (values, tuple(picked) if len(picked) > 1 else picked[0]), {}
        )
    if not row_dim and len(picked) == len(parts) == 1:
        return NotImplemented
    shown = [harmless_operands("index", part) for part in picked]
    with trace_masks.recorder.on():
        rows = PickedRows(picked[0].row_mask, values[(*parts[:row_dim], *shown, *parts[row_dim + len(picked) :])])
    rows.row_dim = row_dim
    return rows


def _of_each(trace_masks: TraceMasks, rows: PickedRows, index: Any) -> Any:
    """`rows[torch.arange(len(rows)), classes]`, and `rows[kept, :]`."""
    parts = index if isinstance(index, tuple) else (index,)
    while len(parts) > 1 and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts = parts[:-1]
    if len(parts) == 1 and len(parts) != (len(index) if isinstance(index, tuple) else 1):
        return rows[parts[0]]
    is_each = (
        len(parts) == 2 and all(isinstance(part, PickedRows) for part in parts) and parts[0].indices_of == ROW_NUMBERS
    )
    column = parts[1] if is_each else None
    if (
        column is None
        or column.row_mask is not rows.row_mask
        or parts[0].row_mask is not rows.row_mask
        or column.values.ndim != 1
    ):
        return NotImplemented
    return of_columns(trace_masks, rows, column)


def of_columns(trace_masks: TraceMasks, rows: PickedRows, column: PickedRows) -> PickedRows:
    """One element along the second dim of each row; negative numbers count from the end."""
    trailing = rows.values.ndim - 2
    with trace_masks.recorder.on():
        number = harmless_operands("gather", column)
        number = torch.where(number < 0, number + rows.values.shape[1], number)
        number = number[(..., *[None] * (trailing + 1))]
        if trailing:
            number = number.expand(-1, -1, *rows.values.shape[2:])
        return PickedRows(rows.row_mask, harmless_operands("gather", rows).gather(1, number).squeeze(1))


def _viewed(trace_masks: TraceMasks, name: str, rows: PickedRows, arguments: Any, kwargs: Any) -> Any:
    """All elements flattened; or rows formed from elements, if the mask is equal for all elements of such a row."""
    sizes = rows.values.shape
    view_sizes: list[Any]
    if name == "flatten":
        given_dims = (
            {"start_dim": 0, "end_dim": -1} | dict(zip(("start_dim", "end_dim"), arguments, strict=False)) | kwargs
        )
        view_sizes = [-1] if (*given_dims.values(),) == (0, -1) else []
    else:
        view_sizes = (
            list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else list(arguments)
        )
    if not view_sizes or not all(isinstance(size, int) for size in view_sizes) or view_sizes[0] != -1:
        return NotImplemented
    row_shape = view_sizes[1:]
    if not row_shape and math.prod(sizes[1:]) > 1:
        return all_in_a_row(trace_masks, rows, [], whole=True)
    if len(sizes) > 1 or not row_shape or -1 in row_shape:
        return NotImplemented
    row_mask = unexpanded_mask(trace_masks, rows.row_mask, math.prod(row_shape))
    if row_mask is None:
        return NotImplemented
    with trace_masks.recorder.on():
        return PickedRows(
            row_mask, rows.values.reshape(row_mask.flat_mask.shape[0], *row_shape), unpicked_hold=rows.unpicked_hold
        )


def all_in_a_row(trace_masks: TraceMasks, rows: PickedRows, row_shape: list[int], *, whole: bool) -> PickedRows:
    """Rows of all indices of the dims before, in sequence; `whole`: as elements, else as rows of shape `row_shape`."""
    sizes = [int(size) for size in rows.values.shape]
    before, behind = sizes[: rows.row_dim], sizes[rows.row_dim + 1 :] if whole else []
    with trace_masks.recorder.on():
        key = ("row", rows.row_mask, tuple(before), tuple(behind))
        if key not in trace_masks.derived:
            mask = rows.row_mask.flat_mask[(..., *[None] * len(behind))] if behind else rows.row_mask.flat_mask
            trace_masks.derived[key] = trace_masks.of(mask.expand(*before, sizes[rows.row_dim], *behind))
        row_mask = trace_masks.derived[key]
        return PickedRows(
            row_mask, rows.values.reshape(row_mask.flat_mask.shape[0], *row_shape), unpicked_hold=rows.unpicked_hold
        )


def unexpanded_mask(trace_masks: TraceMasks, row_mask: RowMask, elements: int) -> RowMask | None:
    """The row mask of which `row_mask` is an expansion along last dims with so many elements; None if unknown."""
    key = ("each", row_mask, elements)
    if key in trace_masks.derived:
        return trace_masks.derived[key]
    for joined, expanded in trace_masks.derived.items():  # `rows.flatten().view(-1, 4)`
        if expanded is row_mask and joined[0] == "row" and not joined[2] and math.prod(joined[3]) == elements:
            return joined[1]
    full = row_mask.mask.shape
    dims = next((n for n in range(len(full)) if math.prod(full[n:]) == elements), None)
    if dims is None:
        return None
    with trace_masks.recorder.on():
        mask = _constant_along(trace_masks, row_mask.node, len(full), dims)
        if mask is None:
            return None
        trace_masks.derived[key] = trace_masks.of(mask)
    return trace_masks.derived[key]


def _constant_along(trace_masks: TraceMasks, node: Any, rank: int, dims: int) -> Tensor | None:
    """A mask without its dims from `dims` on, if it or its operands were expanded along these; None if unknown."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name in _BY_ELEMENT and not node.kwargs and node.meta[VAL].ndim == rank:
        parts = [
            _constant_along(trace_masks, operand, rank, dims) if isinstance(operand, fx.Node) else operand
            for operand in node.args
        ]
        function = getattr(Tensor, name) if node.op == "call_method" else node.target
        return None if any(operand is None for operand in parts) else function(*parts)
    inner = node.args[0] if name in _EXPANDING and node.op == "call_method" else None
    if inner is None or inner.meta[VAL].ndim != rank or any(size != 1 for size in inner.meta[VAL].shape[dims:]):
        return None
    shape = node.meta[VAL].shape[:dims]
    if inner.meta[VAL].shape[:dims] != shape:
        return None
    while isinstance(inner, fx.Node) and inner.meta[VAL].ndim > dims and _only_adds_dims(inner):
        inner = inner.args[0]
    recorder = trace_masks.recorder
    mask = next(
        (operand for operand in recorder.alive if recorder.nodes.get(id(operand)) is inner and operand._version == 0),
        None,
    )
    return mask if mask is None or mask.ndim == dims else mask.reshape(shape)


def _only_adds_dims(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return (
        name in ("unsqueeze", "getitem")
        and isinstance(source, fx.Node)
        and source.meta[VAL].shape == node.meta[VAL].shape[: source.meta[VAL].ndim]
        and source.meta[VAL].numel() == node.meta[VAL].numel()
    )
