"""Parameters and buffers that a model also holds in plain lists, dicts and attributes, unseen by `nn.Module`.

With `self.weights = [self.embedding.weight]` or `self.__dict__["weight"] = self.projection.weight`, forward reads the
registered tensors through another reference. Code that replaces a model's registered tensors (a trace by data-free
ones, a plan by shards) must replace these references too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.python.containers import length

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = list, tuple, dict
_MOST = 10_000  # elements: a longer container is taken for data and not searched


class _Place(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], None]


class Held:
    """All references to a model's registered tensors outside of its modules' registries."""

    def __init__(self, model: nn.Module) -> None:
        registered: dict[int, tuple[dict[str, Any], str]] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        registered.setdefault(id(tensor), (tensors, name))
        self._places = [
            (place, registered[id(place.get())])
            for module in model.modules()
            for place in _tensors(module)
            if id(place.get()) in registered
        ]

    def update(self) -> None:
        """Set each reference to the tensor that is registered now."""
        for place, (tensors, name) in self._places:
            place.put(tensors[name])

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """While inside, registered tensors may be replaced one by one; at the end the references follow.

        Inside, the references are None, so that they keep no replaced tensor alive.
        """
        for place, _ in self._places:
            place.put(None)
        try:
            yield
        finally:
            self.update()


def _tensors(module: nn.Module) -> Iterator[_Place]:
    own, visited = vars(module), {id(module)}
    for name, value in list(own.items()):
        is_filled = isinstance(value, _CONTAINERS) and length(value) and name not in _REGISTERED
        if is_filled or isinstance(value, torch.Tensor):
            yield from _inside(_item(own, name), visited)


def _inside(place: _Place, visited: set[int]) -> Iterator[_Place]:
    """The tensors at a place, in a container there, and in containers nested in it."""
    value = place.get()
    if isinstance(value, torch.Tensor):
        yield place
    elif isinstance(value, _CONTAINERS) and id(value) not in visited and 0 < length(value) <= _MOST:
        visited.add(id(value))
        for key in list(value) if isinstance(value, dict) else range(length(value)):
            yield from _inside(_part(place, key) if isinstance(value, tuple) else _item(value, key), visited)


def _item(container: Any, key: Any) -> _Place:
    def put(value: Any) -> None:
        container[key] = value

    return _Place(lambda: container[key], put)


def _part(whole: _Place, index: int) -> _Place:
    """The place of a tuple's element: setting it replaces the tuple."""

    def put(value: Any) -> None:
        before = whole.get()
        parts = [*before[:index], value, *before[index + 1 :]]
        whole.put(type(before)(*parts) if hasattr(before, "_fields") else type(before)(parts))

    return _Place(lambda: whole.get()[index], put)
