"""What a traced forward changes in its modules: attributes that calls set, states it has found, and what is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.states import ABSENT, State, placeholder_name
from autopar.tracing.calls.inputs import leaf_names


class Kept(NamedTuple):
    """An attribute of the module at `path`, and what forward has left in it."""

    path: str
    name: str
    value: Any


class ChangedAttributes(NamedTuple):
    """The attributes that forward has changed.

    `set`: those that calls set. `states`: further states, which have to become inputs. `maybe_states`: attributes made
    from constants, which are tables if a second call does not set them again; if it does, states (True) or lost
    (False). `from_constants`: all that are made from constants, with a `Look` for each tensor. `lost`: names of those
    that calls cannot set.
    """

    set: list[Kept]
    states: list[State]
    maybe_states: dict[State, bool]
    from_constants: dict[State, Any]
    lost: list[str]

    def outputs(self, place: int) -> dict[int, tuple[str, str]]:
        """The flat outputs from `place` on that are tensors of attributes, each with the names that attribute and
        tensor have as inputs if it is a state."""
        names_of_outputs = dict[int, tuple[str, str]]()
        for path, name, value in self.set:
            argument = State(path, name).argument
            leaves, names = pytree.tree_leaves(value), iter(leaf_names(placeholder_name(argument), value))
            names_of_outputs |= {
                place + i: (argument, next(names)) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)
            }
            place += len(leaves)
        return names_of_outputs


@dataclass(frozen=True)
class SetByCalls:
    """Attributes of modules that calls of the graph set, because forward does.

    `names`: path and name of each. `spec`: rebuilds their values from the graph's flat outputs, of which they are the
    last. `outputs`: flat outputs that are tensors of such attributes, each with the names that attribute and tensor
    have as inputs if it is a state. `of_loss`: modules of the loss by path; all other paths are in the model.
    """

    names: tuple[tuple[str, str], ...] = ()
    spec: pytree.TreeSpec = field(default_factory=lambda: pytree.tree_structure([]))
    outputs: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    of_loss: Mapping[str, nn.Module] = field(default_factory=dict)

    def same_as(self, other: SetByCalls) -> bool:
        """Whether the calls of two traces set the same attributes, to values of the same structure."""
        return (self.names, self.spec) == (other.names, other.spec)

    def set_on(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Set the attributes on the modules of `model`. `leaves`: the flat outputs that hold their values."""
        if not self.names:
            return
        for (path, name), value in zip(self.names, pytree.tree_unflatten(leaves, self.spec), strict=True):
            module = self.of_loss[path] if path in self.of_loss else model.get_submodule(path)
            if not isinstance(value, str) or value != ABSENT:
                setattr(module, name, value)
            elif hasattr(module, name):
                delattr(module, name)


@dataclass(frozen=True)
class FoundStates:
    """Attributes that may carry over between calls, as one trace has found them.

    `new`: those that forward reads and sets, and that were not among its inputs. `maybe`: those set from constants
    only, which are states unless they are tables (`ChangedAttributes.maybe_states`). `from_constants`: the values of
    all attributes set from constants. `set_again`: whether a second call sets them again (None: it could not be made).
    """

    new: tuple[State, ...] = ()
    maybe: Mapping[State, bool] = field(default_factory=dict)
    from_constants: Mapping[State, Any] = field(default_factory=dict)
    set_again: Mapping[State, bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class LostChanges:
    """What forward changes and calls of the graph do not. `attributes`: names of attributes of modules. `places`: lines
    that store tensors elsewhere."""

    attributes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
