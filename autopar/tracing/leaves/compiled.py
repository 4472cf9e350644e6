"""Functions that `torch.compile` decorates: one node a call, where its arguments are all it reads.

The decorator's wrapper asks the stance before each call, and tells us there which function it holds. Inside a
trace nothing is compiled; the node's target compiles, with the user's options, when the graph runs. A function
that also reads parameters, writes into its arguments, or asks for data is looked into instead, as is a
compiled module: what it reads must be seen. So is one that makes a number of tensors, a loss: whole, it would want
all logits on every rank, and what it is made of can be split.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.python.replaced import original, replaced
from autopar.tracing import places
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


class CompiledFunction:
    """A compiled function as a node's target; `compiler` is what the user's `torch.compile(...)` made."""

    def __init__(self, function: FunctionType, compiler: Callable[[Any], Callable[..., Any]]) -> None:
        self.function, self.compiler = function, compiler
        self._compiled: Callable[..., Any] | None = None
        self.__name__ = function.__name__.strip("<>")  # fx writes code with it: "<lambda>" is none
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(t.device.type == "meta" for t in _tensors((args, kwargs))):
            return self.function(*args, **kwargs)  # measuring on data-free tensors: there is nothing to compile
        if self._compiled is None:
            self._compiled = self.compiler(self.function)
        return self._compiled(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledFunction) and self.function is other.function

    def __hash__(self) -> int:
        return hash(self.function)


@contextlib.contextmanager
def compiled_functions(recorder: Recorder) -> Iterator[None]:
    """While inside, compiled functions are recorded and not compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing can have been compiled, and importing it takes seconds
        yield
        return
    stance_of = dynamo._callback_from_stance
    held: set[FunctionType] = set()
    with contextlib.ExitStack() as stack:

        def told(callback: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_name == "compile_wrapper" and recorder.is_recording():
                function, compiler = frame.f_locals["fn"], frame.f_locals["self"]
                is_users = isinstance(function, FunctionType) and places.is_users(function.__code__.co_filename)
                if is_users and function not in held:
                    held.add(function)
                    stack.enter_context(replaced(function, _recorded(recorder, function, compiler)))
            return stance_of(callback)

        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(attributes_set(dynamo, _callback_from_stance=told))
        yield


def _recorded(recorder: Recorder, function: FunctionType, compiler: Any) -> Callable[..., Any]:
    run, target = original(function), CompiledFunction(function, compiler)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        is_known = recorder.known.knows(tensors)  # as it is without tensors: masks, whose values decide branches
        if not recorder.is_recording() or is_known or torch._C._is_any_autocast_enabled():
            return run(*args, **kwargs)
        try:
            return recorder.record_call(target, lambda *a, **k: _alone(run, a, k), args, kwargs)
        except Exception:  # what the body does wrong is told, with its place, where it is looked into
            return run(*args, **kwargs)

    return call


def _alone(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`run(*args, **kwargs)`; _NotAlone where it reads other tensors than its arguments, writes into those, or makes a
    number of them."""
    tensors = _tensors((args, kwargs))
    versions = [t._version for t in tensors]
    with _OwnTensors(tensors):
        result = run(*args, **kwargs)
    if versions != [t._version for t in tensors]:
        raise _NotAlone
    if any(t.dim() for t in tensors) and any(not t.dim() for t in _tensors(result)):
        raise _NotAlone
    return result


class _NotAlone(Exception):
    """A function touches more than its arguments, or is better looked into."""


class _OwnTensors(TorchFunctionMode):
    """Raises _NotAlone at a tensor that is none of these, and was not made inside."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.own = {id(t): t for t in tensors}  # alive, so that no identity is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(t) not in self.own for t in _tensors((args, kwargs or {}))):
            raise _NotAlone
        result = func(*args, **(kwargs or {}))
        self.own.update({id(t): t for t in _tensors(result)})
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
