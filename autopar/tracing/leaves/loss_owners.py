"""What a loss function reads besides its arguments: attributes of its object, and captured variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

LOSS = "(loss_fn)"
"""First part of the paths of a loss function's objects, which distinguishes them from paths in the model."""


class Enclosed:
    """The variables that a function captures, as attributes."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_cells"][name].cell_contents
        except (KeyError, ValueError) as error:  # no such variable, or not set yet
            raise AttributeError(name) from error

    def items(self) -> list[tuple[str, Any]]:
        """The variables that have a value, by name."""
        return [(name, getattr(self, name)) for name in self._cells if hasattr(self, name)]

    def put_back(self, values: Mapping[str, Any]) -> None:
        """Restore the values of variables."""
        for name, value in values.items():
            if getattr(self, name, None) is not value:
                self._cells[name].cell_contents = value


def values_in(owner: Any) -> dict[str, Any]:
    """The current values of an owner's attributes or variables, by name; for a module, of its buffers too."""
    if isinstance(owner, Enclosed):
        return dict(owner.items())
    return {**vars(owner), **(owner._buffers if isinstance(owner, nn.Module) else {})}


@contextlib.contextmanager
def restored(owners: Collection[Any]) -> Iterator[None]:
    """At the end, restore the values that owners hold: a trace runs the loss, which may set some of them."""
    enclosed = [(owner, values_in(owner)) for owner in owners if isinstance(owner, Enclosed)]
    spaces = [vars(owner) for owner in owners if not isinstance(owner, Enclosed)]
    spaces += [owner._buffers for owner in owners if isinstance(owner, nn.Module)]
    saved = [(space, dict(space)) for space in spaces]
    try:
        yield
    finally:
        for owner, values in enclosed:
            owner.put_back(values)
        for space, before in saved:
            space.clear()
            space.update(before)


def modules_of(loss_fn: Any) -> dict[str, nn.Module]:
    """The modules among the owners."""
    return {path: owner for path, owner in owners_of(loss_fn).items() if isinstance(owner, nn.Module)}


def owners_of(loss_fn: Any) -> dict[str, Any]:
    """The objects whose values a loss function may read, by path: modules, other objects, closures (`Enclosed`)."""
    owners: dict[str, Any] = {}
    waiting, visited = [(LOSS, loss_fn)], set[int]()
    while waiting:
        path, value = waiting.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, nn.Module):
            owners.update({".".join(filter(None, [path, name])): module for name, module in value.named_modules()})
        elif isinstance(value, functools.partial):
            waiting.append((path, value.func))
        elif isinstance(value, MethodType):
            waiting.append((path, value.__self__))
        elif isinstance(value, FunctionType):
            if value.__closure__:
                owners[path] = Enclosed(value)
                waiting += [
                    (f"{path}.{name}", inner)
                    for name, inner in owners[path].items()
                    if isinstance(inner, (nn.Module, functools.partial, MethodType, FunctionType))
                ]
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            owners[path] = value
    return owners
