"""What a call reads: tensors that it uses in a run, and tensors of the model that its code may reach on other paths."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.tracing.patching import attributes_set

Tensor = torch.Tensor
_LOOKS = ("getattr", "vars", "__dict__", "_modules", "_parameters", "_buffers", "state_dict", "apply", "get_submodule")
_LISTS = ("children", "modules", "parameters", "buffers", "named_children", "named_modules", "named_parameters")
_ALL_OF_IT = {*_LOOKS, *_LISTS, "named_buffers", "get_parameter", "get_buffer"}  # may reach any tensor


class Reads(TorchFunctionMode):
    """Collects tensors that functions are called with, and all tensors of modules that are called."""

    def __init__(self) -> None:
        super().__init__()
        self._met: dict[int, Tensor] = {}  # by id, as repeated trials use the same tensors

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._met.values())

    def _note(self, tensors: Iterable[Tensor]) -> None:
        self._met.update((id(tensor), tensor) for tensor in tensors)

    def run(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self:
            return run(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        met = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._note(met)
        if len({t.device.type for t in met}) > 1:  # the call's own constants have data; make them data-free too
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def of_modules(self) -> Iterator[None]:
        before = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._note((*module.parameters(), *module.buffers()))
            return before(module, *args, **kwargs)

        with attributes_set(nn.Module, __call__=call):
            yield


def reachable(function: FunctionType, owner: Any, originals: Mapping[FunctionType, FunctionType]) -> Iterator[Tensor]:
    """The tensors that a method's code may read from its module on any path, judged by the names that it uses.

    Functions that it names, of the module or its file, are included. `originals`: for functions whose code is currently
    replaced.
    """
    if not isinstance(owner, nn.Module):
        return
    names, waiting, met = set[str](), [originals.get(function, function)], set[FunctionType]()
    while waiting:
        called = waiting.pop()
        if called in met:
            continue
        met.add(called)
        used = set(_names(called.__code__))
        names |= used
        for name in used:
            named = inspect.getattr_static(owner, name, called.__globals__.get(name))
            named = named.fget if isinstance(named, property) else getattr(named, "__func__", named)
            if isinstance(named, FunctionType) and not named.__module__.startswith("torch."):  # `to` is a tensor's
                waiting.append(originals.get(named, named))
    if names & _ALL_OF_IT:
        yield from (*owner.parameters(), *owner.buffers())
        return
    for name in names & {*owner._modules, *owner._parameters, *owner._buffers}:
        value = getattr(owner, name)
        if isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            yield value


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that code names, including code nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
