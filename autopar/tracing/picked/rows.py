"""Ops that treat each picked row by itself: they run on all rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.graph import storage_of
from autopar.tracing.picked.harmless import VIEW_OR_COPY, harmless_operands, meaning, unpicked_hold_after
from autopar.tracing.picked.picked_rows import ALL_DIMS, PickedRows, RowMask, is_plain, picked_rows_in
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import is_pointwise, plain_name
from autopar.tracing.targets import writes_its_first

Tensor = torch.Tensor
ALONG = {  # by op: position of the argument `dim`, and its default
    "softmax": (1, None), "log_softmax": (1, None), "softmin": (1, None), "sum": (1, None), "mean": (1, None),
    "amax": (1, None), "amin": (1, None), "max": (1, None), "min": (1, None), "argmax": (1, None), "argmin": (1, None),
    "logsumexp": (1, None), "cumsum": (1, None), "prod": (1, None), "any": (1, None), "all": (1, None),
    "std": (1, None), "var": (1, None), "unsqueeze": (1, None), "squeeze": (1, None), "gather": (1, None),
    "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "norm": (2, None), "vector_norm": (2, None),
    "normalize": (2, 1), "cosine_similarity": (2, 1), "glu": (1, -1), "chunk": (2, 0), "unbind": (1, 0),
    "split": (2, 0), "select": (1, None), "narrow": (1, None),
}  # fmt: skip
# Ops whose first dim is a batch; functions that keep `PickedRows.indices_of`; and products, costly on all rows.
_OF_A_BATCH = {
    "layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "conv3d", "max_pool1d", "max_pool2d", "avg_pool1d",
    "avg_pool2d", "one_hot", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "pairwise_distance",
}  # fmt: skip
_KEEPING = {"to", "long", "contiguous", "clone", "squeeze", "view", "reshape", "flatten", "__getitem__"}
_PRODUCTS = {"linear", "matmul", "bmm", "mm", "conv1d", "conv2d", "conv3d"}


def record_row_by_row(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The resulting rows, or NotImplemented."""
    operands = picked_rows_in((args, kwargs))
    row_mask = operands[0].row_mask
    if any(rows.row_mask is not row_mask for rows in operands) or writes_its_first(func):
        return NotImplemented
    name = plain_name(func)
    if name in _PRODUCTS:
        if trace_masks.multiplied_mask not in (None, row_mask):
            return NotImplemented
        trace_masks.multiplied_mask = row_mask
    if name == "getitem":
        return _indexed(trace_masks, row_mask, *args)
    if name == "index_select" and len(args) == 3 and args[1] == 0 and not kwargs:
        return _indexed(trace_masks, row_mask, args[0], args[2])
    if name in ("size", "numel", "nelement"):
        return _size(name, *args, **kwargs)
    if name in ("view", "reshape", "flatten"):
        sizes = _sizes(row_mask, name, *args, **kwargs)
        return NotImplemented if sizes is None else run(trace_masks, row_mask, Tensor.reshape, (operands[0], sizes), {})
    if not _by_rows(name, args, kwargs, operands):
        return NotImplemented
    result = run(trace_masks, row_mask, func, args, kwargs)
    if name == "unbind" and operands[0].indices_of == ALL_DIMS:
        for dim, rows in enumerate(result):
            rows.indices_of = dim
    return result


def run(trace_masks: TraceMasks, row_mask: RowMask, func: Any, args: Any, kwargs: Any) -> Any:
    """The call on all rows."""
    name, operands = meaning(func, args), picked_rows_in((args, kwargs))
    if name == "getitem" and not isinstance(args[0], PickedRows):
        name = "index"
    shown, named = harmless_operands(name, (args, kwargs))
    own = {id(picked.values) for picked in operands}
    before = [(picked.values, picked.values._version) for picked in operands]
    copies = [t for t in pytree.tree_leaves((shown, named)) if is_plain(t) and id(t) not in own]
    versions = [copy._version for copy in copies]
    unpicked_hold = unpicked_hold_after(name, operands)
    with trace_masks.recorder.on():
        result = func(*shown, **named)
    if [copy._version for copy in copies] != versions:  # `F.elu(rows, inplace=True)` wrote into a copy
        return NotImplemented
    if any(rows._version != version and storage_of(rows) in trace_masks.maybe_shared for rows, version in before):
        return NotImplemented
    if name in VIEW_OR_COPY:
        trace_masks.maybe_shared |= {storage_of(t) for t in (*(rows for rows, _ in before), result)}
    return pytree.tree_map_only(
        Tensor, lambda tensor: PickedRows(row_mask, tensor, _indices_of(func, args, tensor), unpicked_hold), result
    )


def _indices_of(func: Any, args: Any, result: Tensor) -> int | None:
    """The dim whose indices the resulting rows are, if any."""
    first = args[0] if args else None
    if not isinstance(first, PickedRows) or first.indices_of is None or func.__name__ not in _KEEPING:
        return None
    if result.ndim == first.values.ndim:
        return first.indices_of if func is not Tensor.__getitem__ else None
    if func is Tensor.__getitem__:  # one column
        column = args[1][1] if len(args[1]) == 2 else None
        return column % first.row_mask.mask.ndim if isinstance(column, int) and first.indices_of == ALL_DIMS else None
    return 0 if first.indices_of == ALL_DIMS and first.row_mask.mask.ndim == result.ndim == 1 else None


def _by_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[PickedRows]) -> bool:
    """Whether an op treats each row by itself, given these arguments."""
    first = args[0] if args else None
    if is_elementwise(name, args, kwargs):
        return fit(operands, args, kwargs)
    if name in ("cat", "concat", "stack"):
        return _joins_within_rows(name, args, kwargs, operands)
    if not isinstance(first, PickedRows):
        return name == "embedding" and len(operands) == 1 and is_plain(args[1] if len(args) > 1 else None)
    rank = first.values.ndim
    if name in ALONG:
        return _is_along_other_dims(name, args, kwargs, operands)
    if name in ("transpose", "swapaxes", "permute"):
        dims = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if name == "permute":
            return bool(dims) and dims[0] in (0, -rank)
        return len(dims) == 2 and all(dim % rank for dim in dims)
    if name in ("linear", "matmul", "mm"):
        other = args[1] if len(args) > 1 else None
        return len(operands) == 1 and rank >= 2 and is_plain(other) and other.ndim <= 2
    if name in ("bmm", "scaled_dot_product_attention"):
        return len(operands) == len([a for a in args if isinstance(a, Tensor)]) and rank >= 3
    if name == "embedding":
        return len(operands) == 1
    if name == "pairwise_distance":
        return len(operands) == 2 and rank == 2
    if name in _OF_A_BATCH:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        inner = name not in ("layer_norm", "rms_norm") or len(shape) < rank
        return len(operands) == 1 and inner and (rank >= 2 or name == "one_hot") and _is_batched(name, rank)
    return False


def _joins_within_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[PickedRows]) -> bool:
    """Whether `cat` or `stack` joins picked rows alone, along another dim than that of the rows."""
    parts = list(args[0]) if args and isinstance(args[0], (tuple, list)) else []
    along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    rank = operands[0].values.ndim + (name == "stack")
    are_alike = len(parts) == len(operands) and all(rows.values.ndim == operands[0].values.ndim for rows in operands)
    return are_alike and isinstance(along, int) and along % rank != 0


def _is_along_other_dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[PickedRows]) -> bool:
    """Whether an op in `ALONG` runs along other dims than that of the rows, on picked rows alone."""
    place, default = ALONG[name]
    along = args[place] if len(args) > place else kwargs.get("dim", default)
    rank = args[0].values.ndim + (name == "unsqueeze")
    dims = along if isinstance(along, (tuple, list)) else (along,)
    plain = any(is_plain(value) for value in pytree.tree_leaves((args, kwargs)))
    if plain or any(rows.values.ndim != args[0].values.ndim for rows in operands):
        return False
    return bool(dims) and all(
        isinstance(dim, int) and dim is not True and -rank <= dim < rank and dim % rank for dim in dims
    )


def is_elementwise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "where":  # with only a condition it returns indices
        return len(args) + len(kwargs) == 3
    if name in ("max", "min"):
        return isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor)
    return is_pointwise(name)


def fit(operands: list[PickedRows], args: Any, kwargs: Any) -> bool:
    """Whether operands broadcast with all rows as they do with the picked ones."""
    rank = max(rows.values.ndim for rows in operands)
    others = [t for t in pytree.tree_leaves((args, kwargs)) if is_plain(t)]
    return all(rows.values.ndim == rank for rows in operands) and all(
        t.ndim < rank or _is_one_row(t, rank) for t in others
    )


def intersection(row_mask: RowMask, again: Tensor) -> Tensor:
    """The mask of what a second mask picks from rows that are picked already."""
    with row_mask.recorder.on():
        rows = row_mask.flat_mask
        for _ in range(again.ndim - 1):
            rows = rows.unsqueeze(-1)
        return rows & again


def _is_batched(name: str, rank: int) -> bool:
    dims = next((int(c) for c in name if c.isdigit()), None)
    return dims is None or rank == dims + 2


def _is_one_row(tensor: Tensor, rank: int) -> bool:
    return tensor.ndim == rank > 0 and tensor.shape[0] == 1


def _size(name: str, rows: PickedRows, dim: int | None = None) -> Any:
    if name != "size":
        elements = math.prod(rows.values.shape[1:])
        return rows.row_mask.number * elements if elements != 1 else rows.row_mask.number
    shape = rows.shape
    return shape if dim is None else shape[dim]


def _sizes(row_mask: RowMask, name: str, viewed: Any, *sizes: Any, **kwargs: Any) -> list[int] | None:
    """The shape that a view gives to all rows, if each row stays a row; else None."""
    if not isinstance(viewed, PickedRows):
        return None
    own = list(viewed.values.shape)
    if name == "flatten":
        dims = dict(zip(("start_dim", "end_dim"), sizes, strict=False)) | kwargs
        start, end = dims.get("start_dim", 0) % len(own), dims.get("end_dim", -1) % len(own)
        view_shape: list[Any] = [*own[:start], math.prod(own[start : end + 1]), *own[end + 1 :]]
        return view_shape if view_shape[0] == own[0] else None
    view_shape = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)
    if kwargs or not view_shape or not all(isinstance(size, int) for size in view_shape[1:]):
        return None
    rows, inner_sizes = view_shape[0], view_shape[1:]
    is_count = rows is row_mask.asked_number and rows is not None
    if not is_count and not (isinstance(rows, int) and rows == -1):
        return None
    if is_count and inner_sizes.count(-1) == 1:
        inner_sizes[inner_sizes.index(-1)] = math.prod(own[1:]) // max(
            math.prod(size for size in inner_sizes if size != -1), 1
        )
    return (
        [own[0], *inner_sizes]
        if math.prod(inner_sizes) == math.prod(own[1:]) and min(inner_sizes, default=0) >= 0
        else None
    )


def _indexed(trace_masks: TraceMasks, row_mask: RowMask, indexed: Any, index: Any) -> Any:
    """A part of each picked row; or, for a whole tensor indexed by picked indices, the rows at these."""
    parts = index if isinstance(index, tuple) else (index,)
    while len(parts) > 1 and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts = parts[:-1]
    if isinstance(indexed, PickedRows):
        if len(parts) == 1 and isinstance(parts[0], PickedRows):  # a mask of the rows
            again = parts[0].values
            if again.dtype != torch.bool or again.ndim > indexed.values.ndim:
                return NotImplemented
            return trace_masks.of(intersection(row_mask, again)).rows_of(indexed.values)
        if not all(part is None or part is Ellipsis or isinstance(part, (slice, int)) for part in parts):
            return NotImplemented
        indexed_dims = sum(part is not None and part is not Ellipsis for part in parts)
        whole = parts[0] == slice(None) if isinstance(parts[0], slice) else parts[0] is Ellipsis
        if not whole or (parts[0] is Ellipsis and indexed_dims >= indexed.values.ndim):
            return NotImplemented
        return run(trace_masks, row_mask, Tensor.__getitem__, (indexed, parts), {})
    dims = row_mask.mask.ndim
    if not all(isinstance(part, PickedRows) for part in parts):
        return NotImplemented
    if [part.indices_of for part in parts[:dims]] == list(range(dims)) and indexed.shape[:dims] == row_mask.mask.shape:
        rows = row_mask.rows_of(indexed)
        if len(parts) == dims:
            return rows
        if len(parts) == dims + 1 and parts[dims].values.ndim == 1 and rows.values.ndim == 2:
            return rows.gather(1, parts[dims].unsqueeze(1)).squeeze(1)
        return NotImplemented
    if len(parts) == 1 and not parts[0].values.is_floating_point() and parts[0].values.dtype != torch.bool:
        return run(trace_masks, row_mask, Tensor.__getitem__, (indexed, parts[0]), {})
    return NotImplemented
