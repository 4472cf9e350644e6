"""What a model keeps outside its modules between calls: a trace must leave no data-free tensor there.

A table of sines, for example, is computed once and kept: by `functools.lru_cache`, in a dict, as an attribute of a
class or as a global. If a trace fills such a cache, the model and the next trace would find a tensor without data in
it. Attributes of modules are restored by `Attributes.swapped`.
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

_LIBRARIES = {"einops.einops"}  # Python modules with lru_caches keyed by sizes
_MANY = 512  # tensors: more are not searched for; they are a failed trace's, held by its frames
_ABSENT = object()
# Each with the place ("file:line") that made the tensor, if known.
WeakTensorRefs = list[tuple["weakref.ref[torch.Tensor]", str]]


def forget(remaining: WeakTensorRefs, model: nn.Module) -> None:
    """Remove tensors that a trace made, and that are still referenced, from caches, dicts and lists.

    First the likely places are searched. If any tensors are left, `gc.get_referrers` is used, which has to visit every
    object of the process.
    """
    places_by_id = _by_identity(remaining)
    if 0 < len(places_by_id) <= _MANY:
        take_out(places_by_id.keys(), {place.rpartition(":")[0] for place in places_by_id.values()}, model)
    referenced: list[Any] = [tensor for reference, _ in remaining if (tensor := reference()) is not None]
    remaining.clear()
    for _ in range(DEPTH):
        if not referenced or len(referenced) > _MANY:
            return
        mine, around, dicts = {id(reference) for reference in referenced}, list[Any](), list[dict[Any, Any]]()
        for holder in gc.get_referrers(*referenced):
            if holder is referenced or isinstance(holder, FrameType):
                continue
            if isinstance(holder, _lru_cache_wrapper):
                holder.cache_clear()
            elif type(holder) in DICTS:
                dicts.append(holder)
            elif type(holder) is list:
                holder[:] = [value for value in holder if id(value) not in mine]
            elif isinstance(holder, tuple) or type(holder).__name__ == LINK:
                around.append(holder)
        for holding in _no_namespaces(dicts):
            for key in [key for key, value in holding.items() if id(value) in mine]:
                del holding[key]
        referenced = around


def _by_identity(remaining: WeakTensorRefs) -> dict[int, str]:
    """By id: the places that made the tensors which still exist. Nothing here keeps a reference to them."""
    return {id(tensor): place for reference, place in remaining if (tensor := reference()) is not None}


@contextlib.contextmanager
def library_caches_empty() -> Iterator[None]:
    """While inside, caches of libraries that are keyed by sizes start empty, and they are emptied at the end.

    Cached sizes of a trace are nodes of its graph; and plain numbers cached by an earlier call would change the graph.
    """

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
    """At the end, restore attributes that forward set to data-free tensors: those of the modules' classes, of the
    Python modules that define these, and of plain objects that the model's modules hold."""
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
    objects = (value for value in values if _is_plain(value))
    return {id(namespace): namespace for namespace in (*kinds, *files, *objects) if namespace is not None}.values()


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of a user's class, but no nn.Module, tensor, class or Python module."""
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
    """Those of the dicts that are not the `__dict__` of an object.

    Asked for all of them in one call, since `gc.get_referrers` visits every object of the process.
    """
    if not dicts:
        return []
    attributes = {id(getattr(owner, "__dict__", None)) for owner in gc.get_referrers(*dicts)}
    return [holder for holder in dicts if id(holder) not in attributes]
