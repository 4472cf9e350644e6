"""What a model keeps outside of its modules from call to call: a trace leaves no data-free tensor there.

A table of sines is made once and kept: by `functools.lru_cache`, in a dict, as an attribute of a class or a global.
Behind a trace the model itself would find a tensor without data in its place, and so would the next trace. Attributes
of modules are put back by `Attributes.swapped`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from functools import _lru_cache_wrapper
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.tracing.model_state.near_caches import DEPTH, DICTS, LINK, NO_OBJECTS, take_out

_LIBRARIES = {"einops.einops"}
_MANY = 512  # tensors: more are not looked for, as a failed trace's, which its frames hold
_ABSENT = object()
Left = list[tuple["weakref.ref[torch.Tensor]", str]]  # with "file:line" of the user's code that made it, if known


def forget(left: Left, model: nn.Module) -> None:
    """Take tensors that a trace has made, and that are still there, out of caches, dicts and lists.

    Looked for where they most likely are, and then, if some are left, everywhere: who refers to what is asked of every
    object that there is.
    """
    there = _by_identity(left)
    if 0 < len(there) <= _MANY:
        take_out(there.keys(), {place.rpartition(":")[0] for place in there.values()}, model)
    found: list[Any] = [tensor for one, _ in left if (tensor := one()) is not None]
    left.clear()
    for _ in range(DEPTH):
        if not found or len(found) > _MANY:
            return
        mine, around, dicts = {id(one) for one in found}, list[Any](), list[dict[Any, Any]]()
        for holder in gc.get_referrers(*found):
            if holder is found or isinstance(holder, FrameType):
                continue
            if isinstance(holder, _lru_cache_wrapper):
                holder.cache_clear()
            elif type(holder) in DICTS:
                dicts.append(holder)
            elif type(holder) is list:
                holder[:] = [value for value in holder if id(value) not in mine]
            elif isinstance(holder, tuple) or type(holder).__name__ == LINK:
                around.append(holder)
        for kept in _no_namespaces(dicts):
            for key in [key for key, value in kept.items() if id(value) in mine]:
                del kept[key]
        found = around


def _by_identity(left: Left) -> dict[int, str]:
    """Where those were made that are still there; nothing here holds them."""
    return {id(tensor): place for one, place in left if (tensor := one()) is not None}


@contextlib.contextmanager
def library_caches_empty() -> Iterator[None]:
    """While inside, what libraries keep of the sizes of calls is forgotten: those of a graph are nodes of it, and where
    a cache has plain numbers, from a call before, the graph would be another one."""

    def empty() -> None:
        for name in _LIBRARIES & sys.modules.keys():
            for value in vars(sys.modules[name]).values():
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()

    empty()
    try:
        yield
    finally:
        empty()


@contextlib.contextmanager
def namespaces_restored(model: nn.Module) -> Iterator[None]:
    """What forward sets of classes, of the modules that define them and of plain objects that the model's modules hold
    is as it was afterwards, where it holds data-free tensors."""
    before = [(owner, dict(vars(owner))) for owner in _namespaces(model)]
    try:
        yield
    finally:
        for owner, own in before:
            for name, value in list(vars(owner).items()):
                old = own.get(name, _ABSENT)
                if value is old or not _is_data_free(value):
                    continue
                if old is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)


def _namespaces(model: nn.Module) -> Iterable[Any]:
    modules = list(model.modules())
    kinds = {kind for own in set(map(type, modules)) for kind in own.__mro__ if _is_users(kind)}
    files = (sys.modules.get(kind.__module__) for kind in kinds)
    values = (value for module in modules for value in vars(module).values() if type(value) not in NO_OBJECTS)
    held = (value for value in values if _is_plain(value))
    return {id(one): one for one in (*kinds, *files, *held) if one is not None}.values()


def _is_plain(value: Any) -> bool:
    """Whether it is an object of somebody's class, which is no module, tensor, class or file."""
    if isinstance(value, (nn.Module, torch.Tensor, type, ModuleType)) or not _is_users(type(value)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins", "autopar", "typing", "abc", "functools")


def _is_data_free(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    return isinstance(value, (tuple, list, dict)) and any(
        isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value)
    )


def _no_namespaces(dicts: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """Those that do not hold the attributes of something; asked at once, as who refers to what is asked of every
    object that there is."""
    if not dicts:
        return []
    attributes = {id(getattr(owner, "__dict__", None)) for owner in gc.get_referrers(*dicts)}
    return [one for one in dicts if id(one) not in attributes]
