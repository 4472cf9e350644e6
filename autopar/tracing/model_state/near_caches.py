"""Likely places of caches: a few namespaces, searched from their names.

`gc.get_referrers` finds every holder of a tensor, but it visits every object of the process, and is slower the more
there are. Here only Python modules are searched that define the model's modules or made the tensors: their globals,
classes, functions and plain objects, and containers in these.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import _lru_cache_wrapper
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

DICTS = dict, OrderedDict, defaultdict  # other dict types may not allow deletion, such as outputs of transformers
_SINGLE = frozenset((type(None), bool, int, float, str))  # types of most attributes of modules, besides dicts of hooks
NO_OBJECTS = _SINGLE | {*DICTS, list, tuple, set}
LINK = "_lru_list_elem"  # type name of the link from an lru_cache of limited size to an entry
DEPTH = 4  # levels of tuples, and of such links, around a tensor
_LARGE = 4096  # entries: a larger container is data, not a cache of tables
_WRAPPERS = staticmethod, classmethod
_OTHERS = sys.stdlib_module_names | {"torch", "autopar"}  # their functions and objects are not searched


def take_out(mine: Collection[int], files: Iterable[str], model: nn.Module) -> None:
    """Remove the tensors with these ids from caches found from the modules of `model` and from `files`."""
    for container in _walked(_spaces(files, model)):
        if not isinstance(container, torch.Tensor):
            _empty(container, mine)


def tensors_kept(files: Iterable[str], model: nn.Module, containers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors found there, and in these `containers`."""
    spaces = [*_spaces(files, model), dict(enumerate(containers))]
    return (value for value in _walked(spaces) if isinstance(value, torch.Tensor))


def _spaces(files: Iterable[str], model: nn.Module) -> list[dict[Any, Any]]:
    modules = list(model.modules())
    kinds = {kind for module in modules for kind in type(module).__mro__}
    names = {kind.__module__ for kind in kinds} | _modules_of(files)
    spaces = [vars(sys.modules[name]) for name in names if name in sys.modules and not _is_others(name)]
    spaces += [dict(vars(kind)) for kind in kinds if not _is_others(kind.__module__)]
    return spaces + [vars(module) for module in modules]


def _modules_of(files: Iterable[str]) -> set[str]:
    wanted = set(files)
    # `getattr` would import what libraries import lazily
    loaded = [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    return {name for name, module in loaded if vars(module).get("__file__") in wanted}


def _is_others(name: Any) -> bool:
    return str(name).partition(".")[0] in _OTHERS


def _walked(spaces: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    """Tensors, dicts, lists and lru_caches reachable from these namespaces, also through classes and functions."""
    visited = set[int]()
    waiting = [(value, DEPTH) for space in spaces for value in list(space.values()) if not _is_nothing(value)]
    while waiting:
        value, depth = waiting.pop()
        if not depth or id(value) in visited or issubclass(type(value), (nn.Module, ModuleType)):
            continue
        visited.add(id(value))
        if issubclass(type(value), torch.Tensor):
            yield value
        elif type(value) in DICTS or type(value) is list:
            if len(value) <= _LARGE:
                yield value
                inside = value.values() if isinstance(value, dict) else value
                waiting += [(inner, depth - 1) for inner in list(inside)]
        elif type(value) is _lru_cache_wrapper:
            yield value
        else:
            waiting += [(inner, depth - 1) for inner in _inside(value)]


def _is_nothing(value: Any) -> bool:
    """Whether a value cannot contain anything to find."""
    kind = type(value)
    return kind in _SINGLE or (kind in DICTS and not value)


def _inside(value: Any) -> list[Any]:
    """What a function, class, tuple or plain object holds; `__getattribute__` of proxies is not called."""
    kind = type(value)
    if kind in _WRAPPERS:
        return [value.__func__]
    if kind is property:
        return [value.fget]
    if kind is tuple:
        return list(value) if len(value) <= _LARGE else []
    if kind is FunctionType:
        return [] if _is_others(value.__module__) else [*_enclosed(value), *vars(value).values()]
    if issubclass(kind, type):
        return [] if _is_others(value.__module__) else list(vars(value).values())
    try:
        return [] if _is_others(kind.__module__) else list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:  # it has slots, or a type written in C
        return []


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty cell
            continue


def _empty(container: Any, mine: Collection[int]) -> None:
    if type(container) is _lru_cache_wrapper:
        if any(_has(result, mine) for referent in gc.get_referents(container) for result in _results_in(referent)):
            container.cache_clear()
    elif isinstance(container, dict):
        for key in [key for key, value in container.items() if _has(value, mine)]:
            del container[key]
    elif any(_has(value, mine) for value in container):
        container[:] = [value for value in container if not _has(value, mine)]


def _results_in(of_cache: Any) -> Iterable[Any]:
    """The results among an lru_cache's referents: in its dict, behind a link, or the referent itself."""
    if type(of_cache) is dict:
        return [result for value in of_cache.values() for result in _results_in(value)]
    return gc.get_referents(of_cache) if type(of_cache).__name__ == LINK else (of_cache,)


def _has(value: Any, mine: Collection[int], depth: int = DEPTH) -> bool:
    """Whether a value is one of the tensors, or nested tuples that contain one."""
    if isinstance(value, tuple) and depth:
        return any(_has(element, mine, depth - 1) for element in value)
    return id(value) in mine
