"""Maxima, minima and norms of DTensors as those of whole tensors, where torch (2.11 to 2.15) fails or is wrong.

If 4 ranks share 5 rows, the last has none, and its part has no maximum; torch fails on that rank alone, and the others
wait for it. This happens in `clip_grad_norm_(..., norm_type=inf)` and in logs of `p.grad.abs().max()`. Here such a rank
contributes the neutral element. For ops that tell a position (`argmax`), all ranks gather the whole instead.

The maximum of a tensor with NaN is NaN. Collectives (gloo's, for one) lose it, depending on the order of ranks, so
that a check for overflows finds none. Here parts are combined as those of planned tensors, which keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.runtime.communication.collectives import ReduceOp, all_reduce
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
POSITIONS = (
    *(_aten.argmax.default, _aten.argmin.default, _aten.aminmax.default),
    *(_aten.max.dim, _aten.min.dim),
)


def positioned(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's own implementation, on the whole tensor if some rank holds nothing of it.

    torch fails at a sharded dim that is counted from the end, too.
    """
    tensor, *arguments = args
    if arguments and isinstance(arguments[0], int):
        arguments[0] %= max(tensor.ndim, 1)
    if _has_empty_part(tensor):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return in_torchs_own_way(op_call, (tensor, *arguments), kwargs)


def _has_empty_part(tensor: DTensor) -> bool:
    """Whether some rank holds nothing; each rank answers alike. The last rank along each axis has the least."""
    lengths = [*tensor.shape]
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            lengths[dim] -= min(lengths[dim], -(-lengths[dim] // ranks) * (ranks - 1))
    return tensor.numel() > 0 and 0 in lengths


def extreme(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's own implementation, with one neutral element in each empty part; NaN of any part is kept."""
    read = EXTREMES[op_call](args)
    first = args[0]
    filled = [_filled(tensor, read) for tensor in first] if isinstance(first, (list, tuple)) else _filled(first, read)
    results = in_torchs_own_way(op_call, (filled, *args[1:]), kwargs)
    return list(map(_joined_with_nan, results)) if isinstance(results, (list, tuple)) else _joined_with_nan(results)


def _joined_with_nan(result: Any) -> Any:
    """Parts of a maximum or minimum of floating numbers, combined; anything else as it is."""
    if not isinstance(result, DTensor) or not result.is_floating_point():
        return result
    mesh, value, placements = result.device_mesh, result._local_tensor, [*result.placements]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial) and placement.reduce_op in ("max", "min"):
            op: ReduceOp = "max" if placement.reduce_op == "max" else "min"
            value = all_reduce(value, op, mesh.get_group(axis).group_name)
            placements[axis] = Replicate()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=result.shape, stride=result.stride())


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
