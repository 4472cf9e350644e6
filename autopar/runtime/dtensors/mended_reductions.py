"""Reductions and scans whose results on DTensors are wrong in torch (2.11 to 2.15), without an error.

torch adds up parts of norms that are not yet combined (`torch.stack([p.grad.norm() for p in ...]).sum()`). It does not
know that a scan over dim -1 is one over the last dim, which may be sharded. It takes `dim=()`, which means all dims,
for no dim. Here tensors are combined, and dims made explicit, before torch's own implementation runs. The parts of
`any()` are truth values that torch adds up, so that `grad.isnan().any().float()` is a number of ranks; those of `all()`
and `prod()` cannot be stacked with whole values. They are combined behind these ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensors.empty_parts import EXTREMES, POSITIONS, extreme, positioned
from autopar.runtime.dtensors.joined_parts import has_parts_of_norm, joined, joined_placements
from autopar.runtime.dtensors.own_way import in_torchs_own_way

_aten = torch.ops.aten
_SUMS = _aten.sum.default, _aten.nansum.default, _aten.mean.default
_OVER_DIMS = _aten.sum.dim_IntList, _aten.mean.dim
_COMBINED = (
    *(_aten.any.default, _aten.any.dim, _aten.any.dims, _aten.all.default, _aten.all.dim, _aten.all.dims),
    *(_aten.prod.default, _aten.prod.dim_int),
)
_SCANS = _aten.cumsum.default, _aten.cumprod.default, _aten.logcumsumexp.default


@functools.cache
def mend_reductions() -> None:
    """From now on, these ops give on DTensors what they give on whole tensors. Once a process.

    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for ops, handler in ((_SUMS, _of_joined), (_OVER_DIMS, _over_dims), (_SCANS, _scan)):
        for op in ops:
            handlers.setdefault(op, functools.partial(_mended, handler))
    for op in EXTREMES:
        handlers.setdefault(op, _extreme)
    for op in POSITIONS:
        handlers[op] = positioned
    for op in _COMBINED:
        handlers.setdefault(op, _combined)


def _mended(
    rewritten: Callable[[Any], tuple[Any, ...]],
    op_call: OpOverload[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, object],
) -> object:
    return in_torchs_own_way(op_call, rewritten(args), kwargs)


def _extreme(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    return extreme(op_call, _over_dims(args) if op_call in (_aten.amax.default, _aten.amin.default) else args, kwargs)


def _combined(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    found: object = joined(in_torchs_own_way(op_call, args, kwargs))
    return found


def _of_joined(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with parts that are not plain summands (those of norms) combined; torch takes them for summands."""
    tensor, *arguments = args
    if not has_parts_of_norm(tensor):
        return args
    return (tensor.redistribute(placements=joined_placements(tensor.placements)), *arguments)


def _over_dims(args: tuple[Any, ...]) -> tuple[Any, ...]:
    tensor, *arguments = _of_joined(args)
    if arguments and isinstance(arguments[0], (list, tuple)) and not arguments[0]:
        arguments[0] = [*range(tensor.ndim)]
    return (tensor, *arguments)


def _scan(args: tuple[Any, ...]) -> tuple[Any, ...]:
    tensor, dim, *arguments = args
    return (tensor, dim % max(tensor.ndim, 1), *arguments)
