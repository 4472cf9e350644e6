"""Numbers that a loop reads from DTensors are those of the whole tensor.

`parameter.grad.norm()` is a DTensor whose parts are not combined yet. For its `.item()`, `float()` and `bool()`, torch
(2.13) returns this rank's part: a norm that is too small and differs between ranks, and so different steps of
optimizers that read numbers, such as torch's Adafactor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.ranks.failures import collective_error


@functools.cache
def read_whole_numbers() -> None:
    """From now on, combine a tensor's parts before a number is read from it, by every rank. Once a process.

    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _number)
    for name in ("numpy", "tolist"):  # torch refuses these
        setattr(DTensor, name, _of_whole(name))
    DTensor.__format__ = _formatted  # type: ignore[method-assign,assignment]


def _of_whole(name: str) -> Callable[..., Any]:
    """A method of `torch.Tensor`, called on the whole of a DTensor."""

    @functools.wraps(getattr(torch.Tensor, name))
    def method(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor.full_tensor(), name)(*args, **kwargs)

    return method


def _formatted(tensor: DTensor, spec: str) -> str:
    """A number as text, as loops log what `clip_grad_norm_` returns. Rank 0 alone may do so: no communication."""
    if not spec:
        return str(tensor)
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise InputError(
            "a number of which each rank has only a part is formatted: read it first, on every rank "
            "(`norm = clip_grad_norm_(...).item()`)"
        )
    return format(tensor.to_local(), spec)


def _number(op_call: OpOverload[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    (tensor,) = args
    assert isinstance(tensor, DTensor)
    if all(placement.is_replicate() for placement in tensor.placements):
        return op_call(tensor.to_local())
    try:
        return op_call(tensor.full_tensor())
    except RuntimeError as error:
        raise collective_error(
            "a number that is read of a sharded tensor (`.item()`, `float()`), by every rank alike,", error
        ) from error
