"""Maxima, minima and norms of DTensors of which some rank holds nothing: torch (2.11 to 2.15) fails on that rank alone.

If 4 ranks share 5 rows, the last has none, and its part has no maximum; the other ranks then wait for it. This happens
in `clip_grad_norm_(..., norm_type=inf)` and in logs of `p.grad.abs().max()`. Here such a rank contributes the neutral
element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensors.own_way import in_torchs_own_way

_aten = torch.ops.aten


class _Read(NamedTuple):
    """How an op reduces its first argument: over `dims` (None: all), and what decides on the neutral element."""

    dims: Sequence[int] | None
    least: bool  # whether it is a minimum, not a maximum
    absolute: bool  # of absolute values


def _extreme(*, least: bool) -> Callable[[tuple[Any, ...]], _Read]:
    return lambda args: _Read(args[1] if len(args) > 1 else None, least, absolute=False)


def _norm(args: tuple[Any, ...]) -> _Read:
    order = args[1] if len(args) > 1 else 2
    return _Read(args[2] if len(args) > 2 else None, order < 0, absolute=True)


EXTREMES: dict[OpOverload[..., Any], Callable[[tuple[Any, ...]], _Read]] = {
    _aten.max.default: _extreme(least=False),
    _aten.amax.default: _extreme(least=False),
    _aten.min.default: _extreme(least=True),
    _aten.amin.default: _extreme(least=True),
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: lambda args: _norm(args[:2]),
    _aten._foreach_max.default: lambda args: _Read(None, least=False, absolute=False),
}


def extreme(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's own implementation, with one neutral element in each empty part."""
    read = EXTREMES[op_call](args)
    first = args[0]
    filled = [_filled(tensor, read) for tensor in first] if isinstance(first, (list, tuple)) else _filled(first, read)
    return in_torchs_own_way(op_call, (filled, *args[1:]), kwargs)


def _filled(tensor: Any, read: _Read) -> Any:
    if not isinstance(tensor, DTensor) or tensor._local_tensor.numel() or not tensor.numel():
        return tensor
    part = tensor._local_tensor
    reduced = {dim % tensor.ndim for dim in read.dims or range(tensor.ndim)}
    lengths = [max(n, 1) if dim in reduced else n for dim, n in enumerate(part.shape)]
    return DTensor(part.new_full(lengths, _neutral(part.dtype, read)), tensor._spec, requires_grad=False)


def _neutral(dtype: torch.dtype, read: _Read) -> float | int | bool:
    """The smallest number for a maximum, the largest for a minimum; the smallest absolute value is 0."""
    if read.absolute:
        return math.inf if read.least else 0.0
    if dtype == torch.bool:
        return read.least
    if dtype.is_floating_point:
        return math.inf if read.least else -math.inf
    return torch.iinfo(dtype).max if read.least else torch.iinfo(dtype).min
