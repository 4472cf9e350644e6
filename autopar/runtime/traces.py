"""The interface of a trace to the runtime, which is given traces and imports no tracer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from torch import fx, nn

from autopar.calls.entries import Entry
from autopar.calls.states import State
from autopar.layout import Layout
from autopar.plans import Plan


class PlainValues(Protocol):
    """Plain Python values that forward read from its modules while it was traced."""

    def on(self, model: nn.Module) -> Callable[[], dict[str, Any]]:
        """A function that returns the values that have changed in a model (the root or a copy), by name."""


class Traced(Protocol):
    """A traced model.

    `root` is the module that `get_attr` names belong to; `constants` are the trace's own tensors by name. `own_key` is
    the key of the traced call, `other_keys` are those of calls that run the same graph. `loss_names` are the inputs of
    a loss that was traced in. `reads_values` says whether guards depend on values of inputs, `reads_memory` whether
    forward asks how they lie in memory (then `own_key` contains this). `plain_values` are those that modules had;
    `entry` is what was called; `numbers` are the arguments of the traced call that are numbers, `numbers_read` those
    that forward read from tensors, by the place in the model. `states` are attributes of modules that calls get as
    arguments, by the names of these, and set. `set_outputs` says which flat outputs are tensors that calls set on
    modules, with the names that attribute and tensor have as inputs where the attribute is a state.
    """

    @property
    def graph(self) -> fx.Graph: ...
    @property
    def root(self) -> nn.Module: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...
    @property
    def plain_values(self) -> PlainValues: ...
    @property
    def numbers(self) -> Mapping[str, int | float]: ...
    @property
    def numbers_read(self) -> Mapping[str, int | float]: ...
    @property
    def states(self) -> Mapping[str, State]: ...
    @property
    def set_outputs(self) -> Mapping[int, tuple[str, str]]: ...
    @property
    def own_key(self) -> Hashable: ...
    @property
    def other_keys(self) -> list[Hashable]: ...
    @property
    def entry(self) -> Entry: ...
    @property
    def loss_names(self) -> tuple[str, ...]: ...
    @property
    def reads_values(self) -> bool: ...
    @property
    def reads_memory(self) -> bool: ...

    def of(self, model: nn.Module) -> Traced:
        """The same trace with `model`, a copy of the root, in the place of the root, which it no longer holds."""

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any], model: nn.Module) -> Hashable:
        """All that a trace of `model` (`root`, or a copy of it) reads from Python in such a call; equal keys mean equal
        graphs."""

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The values of the graph's placeholders, in order; raises InputError if the call is not the traced one."""

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """What the model returns, from the flat outputs of the graph."""

    def set_on(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Set on a model's modules the attributes that forward sets, from the flat outputs of the graph."""


Replan = Callable[
    [
        nn.Module,
        tuple[Any, ...],
        Mapping[str, Any],
        Mapping[str, Layout],
        Collection[str],
        Sequence[tuple[Traced, Plan]],
        Entry,
        Mapping[str, int],
    ],
    tuple[Traced, Plan],
]
"""Trace and plan another kind of call of a model or its copy. The parameters are: the model, the arguments by position
and by name, how parameters are stored, the names of those that other calls train, the existing traces with their plans
(a plan among them is returned if the call runs the same graph), what is called, and the dims of the rows of states."""
