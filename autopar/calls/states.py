"""States of a model: attributes of its modules that forward reads and sets, so that each call continues from the last.

A state is both an argument of each call, under a name of its own, and a result. What it holds (a tensor, a list of
tensors, None) decides what kind of call it is, as with any argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

ABSENT = "(no such attribute)"
"""The value of a state whose attribute is missing; a string, since it is compared with other arguments by value."""
_PREFIX = "model."  # cannot clash: a Python parameter's name has no dot


@dataclass(frozen=True)
class State:
    """The attribute `name` of the module at `path`.

    >>> State("layers.0", "h").argument
    'model.layers.0.h'
    """

    path: str
    name: str
    owner: Any = field(default=None, compare=False, repr=False)  # the module itself if it is the loss's

    def module(self, model: nn.Module) -> nn.Module:
        """The module that has the attribute."""
        module: nn.Module = model.get_submodule(self.path) if self.owner is None else self.owner
        return module

    @property
    def argument(self) -> str:
        """The name of the state among the arguments of calls."""
        return f"{_PREFIX}{self.path}.{self.name}" if self.path else f"{_PREFIX}{self.name}"

    def read(self, model: nn.Module) -> Any:
        """The current value; `ABSENT` where there is no such attribute."""
        return _holder(self.module(model), self.name).get(self.name, ABSENT)

    def put(self, model: nn.Module, value: Any) -> None:
        """Set the value, bypassing the module's `__setattr__`."""
        holder = _holder(self.module(model), self.name)
        if isinstance(value, str) and value == ABSENT:
            holder.pop(self.name, None)
        else:
            holder[self.name] = value


def without_states(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the caller gave by name, without the states."""
    return {name: value for name, value in kwargs.items() if not name.startswith(_PREFIX)}


def states_in(kwargs: Mapping[str, Any], owners: Mapping[str, Any]) -> dict[State, Any]:
    """The states among the arguments of a call, with their values. `owners`: the loss's modules, by path."""
    values = {name.removeprefix(_PREFIX): value for name, value in kwargs.items() if name.startswith(_PREFIX)}
    places = {name: name.rpartition(".") for name in values}
    return {State(p, last, owners.get(p)): values[name] for name, (p, _, last) in places.items()}


def placeholder_name(argument: str) -> str:
    """The name of an argument's placeholder, which must be a Python identifier.

    >>> placeholder_name("model.layers.0.h"), placeholder_name("x")
    ('model_layers_0_h', 'x')
    """
    return re.sub(r"\W", "_", argument)


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """The dictionary that holds an attribute; a buffer that was registered as None is in `_buffers`."""
    buffers: dict[str, Any] = module._buffers
    return buffers if name in buffers else vars(module)
