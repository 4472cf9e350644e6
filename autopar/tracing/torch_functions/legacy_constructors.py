"""`torch.Tensor(...)`, `torch.FloatTensor(...)` and the like, the legacy constructors, from sizes or from data.

Function modes do not see them, so that their tensors would be unknown to the trace. While a model is traced, they call
the functions that torch recommends instead, `torch.tensor` and `torch.empty`, which are recorded.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopar.tracing.patching import attributes_set

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
# The classes that have a dtype, all of them on the CPU.
_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


@contextlib.contextmanager
def legacy_constructors_recorded(recorder: Recorder) -> Iterator[None]:
    """While inside, legacy constructors in the model's code are recorded."""
    # a trace imports torch's compiler sooner or later, which keeps the `__new__` that it finds
    importlib.import_module("torch._dynamo")
    new = Tensor.__new__

    def recorded_new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind is Tensor and not kwargs and recorder.is_recording() and _is_plain(args):
            return _made(args, torch.get_default_dtype())
        return new(kind, *args, **kwargs)

    stand_ins = {f"{kind}Tensor": _stand_in(recorder, getattr(torch, f"{kind}Tensor")) for kind in _KINDS}
    # `torch.Tensor` itself stays, since its subclasses and `isinstance` need it
    with attributes_set(Tensor, __new__=staticmethod(recorded_new)), attributes_set(torch, **stand_ins):
        yield


def _is_plain(args: Sequence[Any]) -> bool:
    """Whether the arguments are a tensor, data or sizes, and not a storage or an error."""
    if len(args) == 1 and isinstance(args[0], (list, tuple, range, np.ndarray, Tensor)):
        return True
    return all(isinstance(one, int) for one in args)


def _made(args: Sequence[Any], dtype: torch.dtype) -> Tensor:
    first = args[0] if args else None
    if isinstance(first, Tensor):
        return first.view_as(first)
    if isinstance(first, torch.Size):
        return torch.empty(first, dtype=dtype)
    if isinstance(first, (list, tuple, range, np.ndarray)):
        return torch.tensor(first, dtype=dtype)
    return torch.empty(tuple(args) or (0,), dtype=dtype)


def _stand_in(recorder: Recorder, kind: Any) -> Any:
    """A class that stands in for such a class."""

    class Kind(type):
        dtype, layout, is_cuda = kind.dtype, kind.layout, kind.is_cuda

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs or not recorder.is_recording() or not _is_plain(args):
                return kind(*args, **kwargs)
            return _made(args, kind.dtype)

        def __instancecheck__(cls, value: Any) -> bool:
            # a data-free tensor tells the device that it claims here, but not to the class itself
            alike = isinstance(value, Tensor) and (value.dtype, value.layout) == (kind.dtype, kind.layout)
            return alike and value.device.type == "cpu"

    return Kind(kind.__name__, (), {"__module__": "torch"})
