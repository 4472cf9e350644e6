"""States of a model: attributes of its modules that forward reads and sets, so that each call goes on from the last.

A state is an argument of each call under a name of its own, and a result of it. What is there (a tensor, a list of
some, None) decides what kind of call it is, as with any argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

ABSENT = "(no such attribute)"
"""Stands for a state that is not there; a word, for it is compared among arguments."""
_PREFIX = "model."  # no name of an argument of a forward has a dot


@dataclass(frozen=True)
class State:
    """The attribute `name` of the module at `path`.

    >>> State("layers.0", "h").argument
    'model.layers.0.h'
    """

    path: str
    name: str
    owner: Any = field(default=None, compare=False, repr=False)  # where it is no module of the model: of its loss

    def module(self, model: nn.Module) -> nn.Module:
        """The module that it is an attribute of."""
        found: nn.Module = model.get_submodule(self.path) if self.owner is None else self.owner
        return found

    @property
    def argument(self) -> str:
        """By which name it is among the arguments of calls."""
        return f"{_PREFIX}{self.path}.{self.name}" if self.path else f"{_PREFIX}{self.name}"

    def read(self, model: nn.Module) -> Any:
        """What is there now; `ABSENT` where nothing is."""
        return _holder(self.module(model), self.name).get(self.name, ABSENT)

    def put(self, model: nn.Module, value: Any) -> None:
        """Put it there as it is, without the module's own `__setattr__`."""
        holder = _holder(self.module(model), self.name)
        if isinstance(value, str) and value == ABSENT:
            holder.pop(self.name, None)
        else:
            holder[self.name] = value


def without_states(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a caller gave by name."""
    return {name: value for name, value in kwargs.items() if not name.startswith(_PREFIX)}


def states_in(kwargs: Mapping[str, Any], owners: Mapping[str, Any]) -> dict[State, Any]:
    """What is among the arguments of a call of states. `owners`: the loss's modules, by path."""
    given = {name.removeprefix(_PREFIX): value for name, value in kwargs.items() if name.startswith(_PREFIX)}
    places = {name: name.rpartition(".") for name in given}
    return {State(p, last, owners.get(p)): given[name] for name, (p, _, last) in places.items()}


def placeholder_name(argument: str) -> str:
    """What an argument is called in a graph, whose names are those of variables.

    >>> placeholder_name("model.layers.0.h"), placeholder_name("x")
    ('model_layers_0_h', 'x')
    """
    return re.sub(r"\W", "_", argument)


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """The dictionary in which an attribute is kept: a buffer that was None is a state, too."""
    buffers: dict[str, Any] = module._buffers
    return buffers if name in buffers else vars(module)
