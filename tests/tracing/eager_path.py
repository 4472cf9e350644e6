"""The torch functions that a real (eager) run calls, in order, with the shapes and dtypes of their results.

Only live calls are compared: those that write into a tensor, and those whose result a live call or the caller reads.
Neither graph nor eager calls contain what only Python asks (`mask.all()`) or what is only asked for its size. A graph
uses other names for some functions, see `SPELLED`. Under `no_grad` a graph detaches tensors that need a gradient
instead of using the mode, so there `detach` is ignored on both sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ExpertsInterface

from autopar.graph import GRAD_MODE, VAL, output_tensors
from autopar.tracing.handlers import WRITTEN_AS
from autopar.tracing.rewriting.cleaning import WRITES
from autopar.tracing.torch_functions.looked_into import LOOKED_INTO, look_into

Call = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]

# Operators have Python's names, whichever method implements them; properties have the method's name.
SPELLED = {
    "div": "truediv", "__rsub__": "sub", "__rpow__": "pow", "__rdiv__": "truediv", "__rtruediv__": "truediv",
    "remainder": "mod", "__and__": "and", "__rmod__": "mod",
    "bitwise_and": "and", "__or__": "or", "bitwise_or": "or", "__invert__": "invert", "__xor__": "xor",
    "bitwise_xor": "xor", "T": "permute", "mT": "transpose", "H": "adjoint", "mH": "adjoint", "data": "detach",
}  # fmt: skip
# Functions that do the same as another, whose name is compared instead.
SAME = {"t": "permute", "negative": "neg"}


def spelled(name: str) -> str:
    """The name by which a function is compared."""
    name = SPELLED.get(name, name).strip("_")
    return SAME.get(name, name)


class EagerCalls(TorchFunctionMode):
    """Records every call of a torch function that makes or changes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Call, list[torch.Tensor], list[torch.Tensor], bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKED_INTO:
            return look_into(self, func, args, kwargs or {})  # as the tracer does
        read = _tensors((args, kwargs))
        versions = [_version(v) for v in read]
        result = func(*args, **(kwargs or {}))
        name = getattr(WRITTEN_AS.get(func, func), "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        writes = versions != [_version(v) for v in read]
        made = [v for v in _tensors(result) if writes or not any(v is r for r in read)]
        if name == "detach" and not torch.is_grad_enabled():
            name = ""
        if made or writes:
            facts = tuple((tuple(v.shape), v.dtype) for v in made)
            self.calls.append(((spelled(name), facts), read, made, writes))
        return result

    @contextlib.contextmanager
    def experts_as_one(self) -> Iterator[None]:
        """While active, a mixture's experts are recorded as one call, since they are one node of a graph."""
        interface = ExpertsInterface
        find = interface.get_interface

        def get_interface(library: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            forward = find(library, implementation, default)

            def run(module: Any, *args: Any) -> torch.Tensor:
                with _pop_mode_temporarily():
                    result: torch.Tensor = forward(module, *args)
                facts = ((tuple(result.shape), result.dtype),)
                self.calls.append((("experts", facts), _tensors(args), [result], False))
                return result

            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interface, "get_interface", get_interface)
            yield

    @contextlib.contextmanager
    def vmaps_below(self) -> Iterator[None]:
        """While active, functions under `torch.vmap` are recorded below the batching level, as a graph has them."""
        apis: Any = torch._functorch.apis
        original, noting = apis.vmap_impl, False

        def impl(*args: Any, **kwargs: Any) -> Any:
            nonlocal noting
            if noting:
                return original(*args, **kwargs)
            noting = True
            try:
                with _pop_mode_temporarily(), _Below(self):
                    return original(*args, **kwargs)
            finally:
                noting = False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apis, "vmap_impl", impl)
            yield

    def live(self, outputs: Any) -> list[Call]:
        """The live calls, given what the model returned."""
        wanted = {id(v) for v in _tensors(outputs)}
        found = []
        for call, read, made, writes in reversed(self.calls):
            if writes or any(id(v) in wanted for v in made):
                wanted.update(map(id, read))
                if call[0]:
                    found.append(call)
        return found[::-1]


class _Below(TorchDispatchMode):
    """Records the calls that reach the dispatcher."""

    def __init__(self, eager: EagerCalls) -> None:
        super().__init__()
        self.eager = eager

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.eager.calls)
        result = self.eager.__torch_function__(func, types, args, kwargs)
        del self.eager.calls[before + 1 :]  # vmap's last op is dispatched once more on the outer level
        return result


def graph_calls(graph: fx.Graph) -> list[Call]:
    """The live calls of a graph that was traced without splitting biases and with in-place writes."""
    found: list[Call] = []
    wanted: set[fx.Node] = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        made = output_tensors(node)
        if not node.op.startswith("call") or not (WRITES in node.meta or (made and node in wanted)):
            continue
        wanted.update(node.all_input_nodes)
        name = getattr(node.target, "__name__", str(node.target))
        if not _is_item(node) and not (name == "detach" and not node.meta[GRAD_MODE]):
            found.append((spelled(name), tuple((tuple(v.shape), v.dtype) for v in made)))
    return found[::-1]


def difference(eager: list[Call], traced: list[Call]) -> str:
    """A description of the first difference between two sequences; "" if they are equal."""
    for place, (ours, theirs) in enumerate(zip(traced, eager, strict=False)):
        if ours != theirs:
            return f"call {place}: eager {eager[place - 1 : place + 3]}, traced {traced[place - 1 : place + 3]}"
    if len(eager) != len(traced):
        return f"eager goes on with {eager[len(traced) :][:3]}, the trace with {traced[len(eager) :][:3]}"
    return ""


def _is_item(node: fx.Node) -> bool:
    """Whether a node is a `getitem` that picks one of several results, which is not a call of torch."""
    name = getattr(node.target, "__name__", "")
    return name == "getitem" and not isinstance(node.args[0].meta[VAL], torch.Tensor)  # type: ignore[union-attr]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
