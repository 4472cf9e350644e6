"""`torch.autograd.Function`: one opaque node a call, its own backward kept.

The recorder would see only the operations inside `forward`, and a replay would differentiate those. `apply`
is often bound early, so what is replaced is the method that `Function.apply` itself calls.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction

from autopar.tracing.drawing import Drawing
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder
from autopar.tracing.replaced import original, replaced

_APPLY: Any = vars(torch._C._FunctionBase)["apply"]  # what `Function.apply` ends in


class CustomFunction:
    """A call of an autograd function as a node's target; the same function gives an equal target.

    `draws`: whether it draws random numbers.
    """

    draws = False

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        # generated code calls what is in torch by its name, which here is that of the class
        is_torchs = function.__module__.partition(".")[0] == "torch"
        self.__module__ = "torch_functions" if is_torchs else function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)


@contextlib.contextmanager
def custom_functions(recorder: Recorder) -> Iterator[None]:
    """While inside, `MyFunction.apply(...)` in the user's code is recorded as one node."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = _APPLY.__get__(None, cls)
        if not recorder.is_recording():
            return run(*args, **kwargs)
        target = CustomFunction(cls)
        return recorder.record_call(target, partial(_run_data_free, target, run), args, kwargs)

    with attributes_set(_SingleLevelFunction, apply=classmethod(apply)):
        yield


def _run_data_free(target: CustomFunction, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function inside; a tensor that it makes without a device belongs to the others where it must be on theirs."""
    with Drawing() as drawing:
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            if "device" not in str(error):
                raise
            with torch.device("meta"):
                result = run(*args, **kwargs)
    target.draws = drawing.draws
    return result


@contextlib.contextmanager
def one_node_functions(recorder: Recorder, functions: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """While inside, a call of one of these Python functions is recorded as one node."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            if not isinstance(function, types.FunctionType):
                raise TypeError(f"autowrap_functions: {function!r} is not a Python function")
            stack.enter_context(replaced(function, _recorded(recorder, function, original(function))))
        yield


def _recorded(recorder: Recorder, function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return recorder.record_call(function, run, args, kwargs) if recorder.is_recording() else run(*args, **kwargs)

    return call
