"""`torch.autograd.Function`: each call is one opaque node that keeps its own backward.

Otherwise the recorder would see only the operations inside `forward`, and a replay would differentiate those.
`MyFunction.apply` is often bound early, and since torch 2.14 `Function.apply` itself is a C method that cannot be
replaced. But it looks `forward` up in the class through the metaclass, which returns a recorded version here.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionMeta
from torch.utils import _pytree as pytree

from autopar.errors import UntraceableError
from autopar.python.replaced import original, replaced
from autopar.tracing.errors import TraceError
from autopar.tracing.leaves.drawing import Drawing
from autopar.tracing.leaves.reads import Reads
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder
from autopar.tracing.values import with_own_identity

_CODE = types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial


class CustomFunction:
    """A call of an autograd function as a node's target; targets of the same function are equal.

    `draws`: whether it draws random numbers.
    """

    draws = False

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        # generated code calls a target in torch by its name, but here that is the class
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
    called: dict[type, bool] = {}  # functions whose `forward` is looked up next: grad mode of the call

    def find(cls: Any, name: str) -> Any:
        attribute = type.__getattribute__(cls, name)
        if name == "_backward_cls" and recorder.is_recording():  # a call begins and creates its ctx
            called[cls] = torch.is_grad_enabled()
        elif name == "forward" and cls in called:
            return partial(_record, recorder, cls, attribute, called.pop(cls))
        return attribute

    with attributes_set(FunctionMeta, __getattribute__=find):
        yield


def _record(recorder: Recorder, cls: Any, forward: Callable[..., Any], with_grad: bool, *args: Any) -> Any:
    """The result of `forward`, registered to a node for the whole call; `apply`, which called it, adds the backward."""
    ctx = args[:1] if args and isinstance(args[0], cls._backward_cls) else ()  # none with `setup_context`
    target = CustomFunction(cls)

    def run(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        reads = Reads()
        with torch.no_grad(), reads.of_modules():  # `apply` adds the history afterwards, also to a view of an argument
            try:
                result = reads.run(_run_data_free, (target, forward, *ctx, *args), {})
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error).lower():
                    raise
                reason = (str(error).strip().splitlines() or [""])[0][:200]
                message = f"{target.__qualname__} needs the contents of tensors ({reason})"
                raise recorder.unknown(message, deciding=tensors) from error
            outputs = pytree.tree_map_only(torch.Tensor, lambda t: with_own_identity(t, tensors), result)
        returned = {id(tensor) for tensor in pytree.tree_leaves(result)}
        _check_reads(recorder, target, args, reads)
        written = (t for t, version in zip(tensors, versions, strict=True) if t._version != version)
        if any(id(tensor) in returned for tensor in written):
            raise TraceError(
                f"{target.__qualname__} returns an argument that it wrote into: let it return a new tensor, or name "
                "the function around it in autowrap_functions",
                where=recorder.where(),
            )
        return outputs

    with torch.set_grad_enabled(with_grad):
        result = recorder.record_call(target, run, args[len(ctx) :], {})
    recorder.await_backward(result)
    return result


def _check_reads(recorder: Recorder, target: CustomFunction, args: Sequence[Any], reads: Reads) -> None:
    """Raise if a call would use the model's own tensors instead of the plan's: it is given a module or code, or reads
    tensors that it is not given."""
    leaves = pytree.tree_leaves(args)
    argument_ids = {id(leaf) for leaf in leaves}
    codes = (leaf for leaf in leaves if isinstance(leaf, (torch.nn.Module, *_CODE)))
    others = (t for t in reads.tensors if id(t) not in argument_ids and recorder.attributes.original(t) is not t)
    if (code := next(codes, None)) is not None:
        fault = f"is given a {type(code).__name__}"
    elif (other := next(others, None)) is not None:
        fault = f"reads '{recorder.node_of(other).target}', which it is not given"
    else:
        return
    raise UntraceableError(
        f"{target.__qualname__} {fault}: its backward would read the model's parameters and not the plan's. Pass "
        "the tensors that it reads as arguments; where it recomputes, call torch.utils.checkpoint.checkpoint instead",
        where=recorder.where(),
    )


def _run_data_free(target: CustomFunction, forward: Callable[..., Any], *args: Any) -> Any:
    """Run the function; if devices differ, since it creates a tensor without device, again with meta as default."""
    with Drawing() as drawing:
        try:
            result = forward(*args)
        except RuntimeError as error:
            if "device" not in str(error):
                raise
            with torch.device("meta"):
                result = forward(*args)
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
