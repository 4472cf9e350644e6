"""Ops that combine picked rows: sums, means, extrema and losses leave out rows that are not picked."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F

from autopar.tracing.picked.harmless import harmless_operands
from autopar.tracing.picked.picked_rows import PickedRows, fill_unpicked, is_plain, picked_rows_in
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
# By reduction: the fill of rows that are not picked, which does not affect the result.
_INFINITE = {"amax": -math.inf, "max": -math.inf, "amin": math.inf, "min": math.inf}
_NEUTRAL = {"any": False, "all": True, "count_nonzero": 0, "norm": 0, "vector_norm": 0, "prod": 1}
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
LOSSES: set[Any] = {
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss,
    F.hinge_embedding_loss, F.margin_ranking_loss, F.cosine_embedding_loss, F.triplet_margin_loss,
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
}  # fmt: skip
OF_ROWS = {*_OF_CLASSES, F.multi_margin_loss, F.cosine_embedding_loss}  # losses with one target for each row


def record_reduction(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result, or NotImplemented."""
    if func in LOSSES:
        return _loss(trace_masks, func, args, kwargs)
    name = plain_name(func)
    met = picked_rows_in((args, kwargs))
    if len(met) != 1 or not args or met[0] is not args[0]:
        return NotImplemented
    if name in ("sum", "mean"):
        return _summed(met[0], name, *args[1:], **kwargs)
    if (len(args) > 1 or kwargs) and not _are_over_rows(met[0], name, args[1:], kwargs):
        return NotImplemented
    if name in _INFINITE and met[0].values.is_floating_point():
        return _with(met[0], func, _INFINITE[name], args[1:], kwargs)
    return _with(met[0], func, _NEUTRAL[name], args[1:], kwargs) if name in _NEUTRAL else NotImplemented


def _with(rows: PickedRows, func: Any, fill: Any, arguments: Any, kwargs: Any) -> Any:
    filled = fill_unpicked(rows, fill)
    with rows.row_mask.recorder.on():
        return func(filled, *arguments, **kwargs)


def _are_over_rows(rows: PickedRows, name: str, arguments: Any, kwargs: Any) -> bool:
    """Whether a reduction names its dims, and that of the rows is among them."""
    place = 1 if name in ("norm", "vector_norm") else 0
    along = arguments[place] if len(arguments) > place else kwargs.get("dim")
    dims = along if isinstance(along, (tuple, list)) else (along,)
    rank = rows.values.ndim
    return name not in ("max", "min") and any(type(dim) is int and dim in (0, -rank) for dim in dims)


def _summed(rows: PickedRows, name: str, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """A sum or mean over dims, that of the rows among them."""
    rank = rows.values.ndim
    if dim is not None and not all(
        isinstance(index, int) for index in (dim if isinstance(dim, (tuple, list)) else (dim,))
    ):
        return NotImplemented
    dims = list(range(rank)) if dim is None else [d % rank for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    counts = name == "mean" and not rows.values.is_floating_point() and not rows.values.is_complex()
    if 0 not in dims or counts:  # torch has no mean of integers
        return NotImplemented
    filled = fill_unpicked(rows, 0)
    with rows.row_mask.recorder.on():
        if name == "sum":
            return filled.sum(dims, keepdim=keepdim, dtype=dtype)
        kind = dtype or filled.dtype
        is_half = kind in (torch.float16, torch.bfloat16)  # its sum may overflow although the mean does not
        total = filled.sum(dims, keepdim=keepdim, dtype=torch.float32 if is_half else dtype)
        elements = math.prod(rows.values.shape[d] for d in dims if d)
        mean = total / (rows.row_mask.count * elements if elements != 1 else rows.row_mask.count)
        return mean.to(kind) if is_half else mean


def _loss(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of picked rows. Class losses get `ignore_index` as targets of the other rows; for others, the unreduced
    loss of all rows is reduced over the picked ones."""
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    picked = picked_rows_in((args, kwargs))
    row_mask, name = picked[0].row_mask, plain_name(func)
    arguments = bound.arguments
    how = arguments.get("reduction", "mean")
    if any(rows.row_mask is not row_mask for rows in picked) or any(
        arguments.get(old) is not None for old in ("size_average", "reduce")
    ):
        return NotImplemented
    plain = [value for name, value in arguments.items() if is_plain(value) and name not in ("weight", "pos_weight")]
    rank = max(rows.values.ndim for rows in picked)
    if not isinstance(arguments.get("input", picked[0]), PickedRows) or any(
        t.ndim >= rank and t.shape[0] != 1 for t in plain
    ):
        return NotImplemented
    target = arguments.get("target")
    if func in OF_ROWS and is_plain(target) and target.ndim and target.shape[0] != 1:
        return NotImplemented  # a plain target for each picked row: see `whole_operands`
    of_classes = how != "none" and func in _OF_CLASSES
    if of_classes and isinstance(target, PickedRows) and not target.values.is_floating_point():
        return _loss_ignoring_rows(trace_masks, func, bound, target)
    arguments["reduction"] = "none"
    arguments.update(harmless_operands(name, dict(arguments)))
    with trace_masks.recorder.on():
        of_rows = PickedRows(row_mask, func(*bound.args, **bound.kwargs))
    if how == "none":
        return of_rows
    if how == "batchmean":
        total = of_rows.sum()
        with trace_masks.recorder.on():
            return total / row_mask.count
    return of_rows.sum() if how == "sum" else of_rows.mean()


def _loss_ignoring_rows(trace_masks: TraceMasks, func: Any, bound: inspect.BoundArguments, target: PickedRows) -> Any:
    """A class loss of all rows, with `ignore_index` as targets of those that are not picked."""
    arguments = bound.arguments
    if not target.values.dtype.is_signed:  # `ignore_index` is mostly negative
        with trace_masks.recorder.on():
            target = PickedRows(target.row_mask, target.values.long())
    arguments["target"] = fill_unpicked(target, arguments.get("ignore_index", -100))
    arguments["input"] = harmless_operands(plain_name(func), arguments["input"])
    with trace_masks.recorder.on():
        return func(*bound.args, **bound.kwargs)
