"""Variance and standard deviation of picked rows, and `softmax` over them: rows that are not picked are left out."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.tracing.picked.harmless import harmless_operands
from autopar.tracing.picked.picked_rows import ANY, PickedRows, fill_unpicked, picked_rows_in
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_SPREADS = ("var", "std", "var_mean", "std_mean")
_OVER_ALL = ("logsumexp", "softmax", "log_softmax", "softmin")


def record_variance_or_softmax(
    trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result, or NotImplemented."""
    name, met = plain_name(func), picked_rows_in((args, kwargs))
    if len(met) != 1 or not args or met[0] is not args[0] or not met[0].values.is_floating_point():
        return NotImplemented
    if name in _SPREADS:
        return _spread(trace_masks, name, met[0], args[1:], dict(kwargs))
    if name in _OVER_ALL and _dims(met[0], args[1] if len(args) > 1 else kwargs.get("dim"))[:1] == [0]:
        return _over_all(trace_masks, func, name, met[0], args[1:], kwargs)
    return NotImplemented


def _dims(rows: PickedRows, along: Any) -> list[int]:
    given_dims = along if isinstance(along, (tuple, list)) else (along,)
    rank = rows.values.ndim
    if not all(type(dim) is int and -rank <= dim < rank for dim in given_dims):
        return []
    return sorted(dim % rank for dim in given_dims)


def _over_all(trace_masks: TraceMasks, func: Any, name: str, rows: PickedRows, arguments: Any, kwargs: Any) -> Any:
    filled = fill_unpicked(rows, math.inf if name == "softmin" else -math.inf)
    with trace_masks.recorder.on():
        result = func(filled, *arguments, **kwargs)
    return result if name == "logsumexp" else PickedRows(rows.row_mask, result, unpicked_hold=ANY)


def _spread(trace_masks: TraceMasks, name: str, rows: PickedRows, arguments: Any, kwargs: dict[str, Any]) -> Any:
    """The sum of squared deviations, over the number of picked rows less the correction (as in torch, at least 0)."""
    arguments = list(arguments)
    is_old = bool(arguments) and isinstance(arguments[0], bool)  # `std(unbiased)`
    correction: Any = arguments.pop(0) if is_old else None
    along = arguments.pop(0) if arguments else kwargs.pop("dim", None)
    for key in ("unbiased", "correction"):
        correction = kwargs.pop(key, correction)
    if arguments and correction is None:
        correction = arguments.pop(0)
    keepdim = arguments.pop(0) if arguments else kwargs.pop("keepdim", False)
    rank = rows.values.ndim
    dims = list(range(rank)) if along is None or along == () or along == [] else _dims(rows, along)
    if arguments or kwargs or dims[:1] != [0] or not isinstance(keepdim, bool):
        return NotImplemented
    correction = 1 if correction is None else int(correction) if isinstance(correction, bool) else correction
    if type(correction) is not int:
        return NotImplemented
    values, kind = harmless_operands(name, rows), rows.values.dtype
    if kind in (torch.float16, torch.bfloat16):  # their sums may overflow
        with trace_masks.recorder.on():
            values = values.float()
    mean = PickedRows(rows.row_mask, values).mean(dims, keepdim=True)
    with trace_masks.recorder.on():
        squares = PickedRows(rows.row_mask, (values - mean) ** 2).sum(dims, keepdim=keepdim)
        count = rows.row_mask.count * math.prod(values.shape[dim] for dim in dims if dim)
        variance = squares / (count - correction).clamp(min=0)
        result = variance
        if name.startswith("std"):  # for equal rows torch's gradient is 0, while that of a root at 0 is infinite
            is_zero = variance == 0
            result = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, variance).sqrt())
        if not name.endswith("mean"):
            return result.to(kind)
        return result.to(kind), (mean if keepdim else mean.squeeze(dims)).to(kind)
