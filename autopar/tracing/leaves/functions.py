"""A function of the model's code as one node: the smallest call around what cannot be traced, where that is no module.

Where the root itself asks for data, one of its methods does (a loss that picks boxes, a decoder that stops early). Only
that function becomes opaque, in the worst case `forward`. Everything that it reads is an argument of its node: tensors
passed in, and those of the model that its code may reach.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.graph import TRIAL_FLOPS
from autopar.leaf_calls import LeafCall
from autopar.python.replaced import is_copy, original, replaced
from autopar.tracing import places
from autopar.tracing.contents.unknown import UnknownNumber
from autopar.tracing.errors import NotOneOpError, TraceError
from autopar.tracing.leaves import opaque
from autopar.tracing.leaves.effects import EffectError, Effects
from autopar.tracing.leaves.reads import Reads, reachable
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.recorder import Recorder
from autopar.tracing.sizes import Traced as TracedNumbers

Tensor = torch.Tensor
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PASSING = (Tensor, *_PLAIN, UnknownNumber, *TracedNumbers)  # types that a node's arguments may hold
_NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions before Python 3.12
_ATTEMPT = str(Path(__file__).parents[1] / "attempt.py")


class FunctionLeaf(LeafCall):
    """The call of such a function: `leaf(tensors, arguments, {})`, with flat arguments that `spec` puts together.

    `names`: the tensors, by their names in the root. `constants`: arguments that no graph can hold, by position.
    `reason`: why the function could not be traced."""

    noun = "function"

    def __init__(
        self, function: FunctionType, module: nn.Module, path: str, names: tuple[str, ...], spec: pytree.TreeSpec,
        constants: Mapping[int, Any], reason: str,
    ) -> None:  # fmt: skip
        super().__init__(_Body(module, function), path, names)
        self.__name__ = self.__qualname__ = f"leaf_{function.__name__}"
        self.function, self.spec, self.constants, self.reason = function, spec, dict(constants), reason

    def __call__(self, tensors: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves = [self.constants.get(i, value) for i, value in enumerate(args)]
        positional, named = pytree.tree_unflatten(leaves, self.spec)
        values = {f"root.{name}": tensor for name, tensor in zip(self.names, tensors, strict=True)}
        return self._called(values, positional, named)

    @property
    def kind(self) -> Any:
        types = tuple(type(value) for value in self.constants.values())
        return (self.function, self.path, self.module.training, self.names, types)


class _Body(nn.Module):
    """The function as the forward of a module, so that the root's tensors can be replaced while it runs."""

    def __init__(self, root: nn.Module, function: FunctionType) -> None:
        super().__init__()
        self.root, self.function = root, function
        self.training = root.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def function_around(
    error: BaseException, tried: Mapping[FunctionType, str], called: Collection[FunctionType]
) -> FunctionType | None:
    """The innermost of the user's functions that ran when a trace failed and was not tried yet.

    Functions that each trace creates anew, as in a class defined within `forward`, are skipped, since the next trace
    would not call the same one. They are recognised by their code: it was `tried`, but the function was never `called`
    as an op.
    """
    codes_of_another_trace = {function.__code__ for function in tried if function not in called}
    running: list[FrameType] = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code.co_filename == _ATTEMPT:
            running = []  # callers of the trace are not the model's code
        elif places.is_users(code.co_filename) and not _is_no_function(code):
            running.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(running):
        if frame.f_code in codes_of_another_trace:
            continue
        holders = _holders(frame)
        if len(holders) > 1:  # several functions with this code, as defined in a function that ran repeatedly
            holders = [f for f in holders if _may_run(f, frame)]
        if len(holders) == 1 and holders[0] not in tried:  # ambiguous for a decorator's wrapper: many share its code
            return holders[0]
    return None


def _is_no_function(code: CodeType) -> bool:
    return bool(code.co_flags & _NOT_PLAIN) or code.co_name in _COMPREHENSIONS


def _holders(frame: FrameType) -> list[FunctionType]:
    """The functions whose code a frame runs."""
    functions = (f for f in gc.get_referrers(frame.f_code) if isinstance(f, FunctionType))
    return [f for f in functions if f.__code__ is frame.f_code and not is_copy(f)]


def _may_run(function: FunctionType, frame: FrameType) -> bool:
    """Whether a frame with this function's code can be a call of it.

    The captured variables must be the same objects, and the function must be a method of the frame's first argument, or
    in a variable of a caller.
    """
    code = frame.f_code
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name in frame.f_locals and cell != CellType() and frame.f_locals[name] is not cell.cell_contents:
            return False
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if any(vars(kind).get(function.__name__) is function for kind in type(owner).__mro__):
        return True
    caller: FrameType | None = sys._getframe()
    while caller is not None:
        if any(value is function for value in caller.f_locals.values()) and caller.f_code.co_filename != __file__:
            return True
        caller = caller.f_back
    return False


def whole_forward(forward: Callable[..., Any], tried: Mapping[FunctionType, str]) -> FunctionType | None:
    """The root's own forward, if it was not tried yet, with or without its decorators."""
    forward = getattr(forward, "__func__", forward)
    if not isinstance(forward, FunctionType) or forward in tried or inspect.unwrap(forward) in tried:
        return None
    return forward


@contextlib.contextmanager
def function_leaves(
    recorder: Recorder, root: nn.Module, policy: LeafPolicy, called: set[FunctionType]
) -> Iterator[None]:
    """While inside, each call of one of the policy's functions is one node, and adds the function to `called`."""
    originals = {function: original(function) for function in policy.functions}
    with contextlib.ExitStack() as stack:
        for function in policy.functions:
            run = partial(_call, recorder, root, function, originals, called, policy)
            stack.enter_context(replaced(function, run))
        yield


def _call(
    recorder: Recorder, root: nn.Module, function: FunctionType, originals: Mapping[FunctionType, FunctionType],
    called: set[FunctionType], policy: LeafPolicy, /, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Record a call of a function leaf as one node; NotOneOpError if it cannot be one."""
    running = recorder.scope[-1][0] if recorder.scope else ""
    is_traced = function in policy.in_root and running != "" and running in dict(root.named_modules())
    if not is_traced:
        called.add(function)
    if is_traced or not recorder.is_recording():
        return originals[function](*args, **kwargs)
    reason = policy.functions[function]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    path = ".".join(filter(None, [running, _name(function)]))
    try:
        outputs, flops, read = _tried(recorder, path, originals[function], leaves, spec)
        may_read = {id(tensor) for tensor in (*read, *reachable(function, leaves[0] if leaves else None, originals))}
        own = (*root.named_parameters(), *root.named_buffers())
        names = {name: tensor for name, tensor in own if id(tensor) in may_read}
        _check_own(recorder, path, names)
    except TraceError as error:
        raise NotOneOpError(reason, error.message, where=error.where) from error
    constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, _PASSING)}
    flat = tuple(None if i in constants else leaf for i, leaf in enumerate(leaves))
    target = FunctionLeaf(function, root, path, tuple(names), spec, constants, reason)
    result = recorder.record_call(target, lambda *_: outputs, (list(names.values()), flat, {}), {})
    next(n for n in reversed(recorder.graph.nodes) if n.target is target).meta[TRIAL_FLOPS] = flops
    return result


def _check_own(recorder: Recorder, path: str, names: Mapping[str, Tensor]) -> None:
    """Raise TraceError if the trial bound one of the model's names to a new tensor, which calls would lose."""
    for name, tensor in names.items():
        try:
            recorder.node_of(tensor)
        except TraceError as error:
            raise TraceError(f"{path} binds '{name}' to another tensor", where=recorder.where()) from error


def _name(function: FunctionType) -> str:
    """The function's name in the model; with its class, if that is a callable object and no module."""
    is_special = function.__name__.startswith("__")
    return function.__qualname__.rpartition("<locals>.")[2] if is_special else function.__name__


def _tried(
    recorder: Recorder, path: str, run: FunctionType, leaves: list[Any], spec: pytree.TreeSpec
) -> tuple[Any, int, list[Tensor]]:
    """The call's data-free outputs, its FLOPs and the tensors it read; raises TraceError if it cannot be a node."""
    reads, tensors = Reads(), [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = [leaf.stand_in if isinstance(leaf, UnknownNumber) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(numbers, spec)
    effects = Effects(args, kwargs, recorder.attributes.model.parameters())
    with recorder.pausing(), reads.of_modules():
        try:
            call = partial(reads.run, run, args, kwargs)
            outputs, flops = opaque.outputs_of_function(call, path, recorder.attributes, recorder.nodes)
            effects.check()
        except EffectError as error:
            raise TraceError(f"{path} {error}", where=recorder.where()) from error
        except opaque.NumbersOfData as error:
            raise TraceError(f"{path} returns numbers that depend on data", where=recorder.where()) from error
        except opaque.REFUSED:
            raise
        except Exception as error:
            raise TraceError(f"{path} does not tell what it returns ({error})", where=recorder.where()) from error
    results, argument_ids = pytree.tree_leaves(outputs), {id(tensor) for tensor in tensors}
    others = [recorder.nodes.get(id(tensor)) for tensor in reads.tensors if id(tensor) not in argument_ids]
    for fault, is_so in (
        ("returns no tensor", not any(isinstance(leaf, Tensor) for leaf in results)),
        ("returns what no graph can hold", not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in results)),
        ("reads tensors that it is not given", any(node is not None and node.op != "get_attr" for node in others)),
    ):
        if is_so:
            raise TraceError(f"{path} {fault}", where=recorder.where())
    return outputs, flops, reads.tensors
