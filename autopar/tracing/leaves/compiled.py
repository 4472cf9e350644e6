"""Functions decorated with `torch.compile`: each call is one node, if the function reads only its arguments.

The decorator's wrapper asks for the stance before each call; there we learn which function it holds. Nothing is
compiled during a trace; the node's target compiles, with the user's options, when the graph runs. The function's body
is traced instead if it reads parameters, writes into its arguments, or asks for data, as is a compiled module's. So is
that of a function that returns a 0-d tensor, a loss: as one op it would need all logits on every rank, while the ops it
consists of can be sharded.
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
        self.__name__ = function.__name__.strip("<>")  # fx writes code with this name: "<lambda>" is no identifier
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(t.device.type == "meta" for t in _tensors((args, kwargs))):
            return self.function(*args, **kwargs)  # a data-free run: nothing to compile
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
    replaced_functions: set[FunctionType] = set()
    with contextlib.ExitStack() as stack:

        def stance_with_functions(callback: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_name == "compile_wrapper" and recorder.is_recording():
                function, compiler = frame.f_locals["fn"], frame.f_locals["self"]
                is_users = isinstance(function, FunctionType) and places.is_users(function.__code__.co_filename)
                if is_users and function not in replaced_functions:
                    replaced_functions.add(function)
                    stack.enter_context(replaced(function, _recorded(recorder, function, compiler)))
            return stance_of(callback)

        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(attributes_set(dynamo, _callback_from_stance=stance_with_functions))
        yield


def _recorded(recorder: Recorder, function: FunctionType, compiler: Any) -> Callable[..., Any]:
    """The replacement of a compiled function: it records one node, or traces the body where that is not possible."""
    run, target = original(function), CompiledFunction(function, compiler)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        is_known = recorder.known.knows(tensors)  # true without tensors: masks, which decide branches
        if not recorder.is_recording() or is_known or torch._C._is_any_autocast_enabled():
            return run(*args, **kwargs)
        try:
            return recorder.record_call(target, lambda *a, **k: _alone(run, a, k), args, kwargs)
        except Exception:  # tracing the body reports the error with its place
            return run(*args, **kwargs)

    return call


def _alone(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`run(*args, **kwargs)`; raises _NotAlone if it reads tensors other than its arguments, writes into these, or
    reduces them to a 0-d tensor."""
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
    """A function uses more than its arguments, or had better be traced."""


class _OwnTensors(TorchFunctionMode):
    """Raises _NotAlone at a tensor that is neither one of these nor made inside."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.own = {id(t): t for t in tensors}  # kept alive, so that no id is reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(id(t) not in self.own for t in _tensors((args, kwargs or {}))):
            raise _NotAlone
        result = func(*args, **(kwargs or {}))
        self.own.update({id(t): t for t in _tensors(result)})
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
