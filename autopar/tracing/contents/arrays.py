"""NumPy's arrays and numbers in a forward: arrays become constants of the trace, numbers become Python's.

A graph is written as source code, in which neither can appear. An array's contents are part of the trace, like those of
a list; whether it changes between calls is checked if a module keeps it (`model_state.plain_reads`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopar.tracing.values import PLAIN

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

_KINDS = (np.ndarray, np.generic)
# Functions that create tensors from data, with the name of that argument.
_MAKERS: dict[Any, str] = {
    torch.tensor: "data",
    torch.as_tensor: "data",
    torch.asarray: "obj",
    torch.Tensor.new_tensor: "data",
}


def any_in(value: Any) -> bool:
    """Whether there are NumPy arrays or numbers among arguments."""
    kind = type(value)
    if kind in PLAIN:
        return False
    if kind is tuple or kind is list:
        return any(map(any_in, value))
    if kind is dict:
        return any(map(any_in, value.values()))
    if kind is slice:
        return any(map(any_in, _bounds(value)))
    return isinstance(value, _KINDS)


def makes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call creates a tensor from an array or number."""
    if func not in _MAKERS:
        return False
    arguments = args[func is torch.Tensor.new_tensor :]
    return not _has_tensors(arguments[0] if arguments else kwargs.get(_MAKERS[func]))


def is_array(tensor: torch.Tensor) -> bool:
    """Whether a tensor uses memory that torch did not allocate, as `torch.from_numpy` returns it.

    Function modes do not see that call, and replacing the function would outlast the trace in modules imported during
    it.
    """
    return tensor.device.type == "cpu" and tensor.is_leaf and not tensor.untyped_storage().resizable()


def recorded_copy(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a copy of the tensor that such a call makes, since the model may write into it."""
    trains = kwargs.pop("requires_grad", False)
    with recorder.pausing():
        if func is torch.Tensor.new_tensor:
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        real = func(*args, **{**kwargs, "device": "cpu"})
        real = torch.empty_like(real).copy_(real)  # does not share the array's memory
    copy = recorder.record(torch.Tensor.clone, recorder.attributes.constant(real))
    return recorder.record(torch.Tensor.requires_grad_, copy) if trains else copy


def as_torch(recorder: Recorder, value: Any) -> Any:
    """Arguments with arrays replaced by constants, and NumPy's numbers by Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        with recorder.pausing():
            real = torch.tensor(value, device="cpu")
        return recorder.attributes.constant(real)
    if isinstance(value, slice):
        return slice(*(as_torch(recorder, bound) for bound in _bounds(value)))
    if isinstance(value, tuple):
        parts = [as_torch(recorder, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [as_torch(recorder, part) for part in value]
    if isinstance(value, dict):
        return {key: as_torch(recorder, part) for key, part in value.items()}
    return value


def _bounds(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)
