"""States, which forward carries between calls in attributes: where one is found, it becomes an input of a new trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.calls.states import State
from autopar.graph import STATE
from autopar.tracing.calls.inputs import Inputs
from autopar.tracing.model_state.changed_state import FoundStates
from autopar.tracing.model_state.left_values import Look
from autopar.tracing.traced import Traced

Run = Callable[[Inputs], Traced]


def with_states(
    root: nn.Module, inputs: Inputs, run: Run, once: Run, set_again_before: Mapping[State, bool | None]
) -> Traced:
    """The trace in which every state is an input. Whenever states turn up that are not, the model is traced again.

    `run` traces; `once` traces without making leaves of what cannot be traced. `set_again_before`:
    `FoundStates.set_again` of an earlier call.
    """
    set_again = {**set_again_before}
    while True:
        traced = run(inputs)
        found = traced.found_states
        new = {state: pytree.tree_map_only(torch.Tensor, _whole, state.read(root)) for state in found.new}
        if not new and not found.maybe.keys() <= set_again.keys():
            set_again |= _set_again(inputs, found, once)
        maybe = {} if new else {state: (goes_on, set_again[state]) for state, goes_on in found.maybe.items()}
        new |= {state: state.read(root) for state, flags in maybe.items() if flags == (True, True)}
        if not new:
            lost = tuple(state.argument.partition(".")[2] for state, (_, again) in maybe.items() if again is not False)
            return replace(
                traced,
                found_states=replace(found, set_again=set_again, from_constants={}),
                lost=replace(traced.lost, attributes=traced.lost.attributes + lost),
            )
        inputs = inputs.with_states(new)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """An example of a state's value; for a DTensor, which calls of the plan set, data-free of its global shape."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    example = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return example.requires_grad_(tensor.requires_grad)


def _set_again(inputs: Inputs, found: FoundStates, once: Run) -> dict[State, bool | None]:
    """For attributes that may be states: whether a second call, which finds what the first has left, sets them again.

    An attribute that is set from constants is either a table, which is set once, or a count; the second call tells. All
    are None if the second call cannot be traced.
    """
    values = {state: pytree.tree_map_only(Look, Look.example, value) for state, value in found.from_constants.items()}
    try:
        again = once(inputs.with_states(values))
    except Exception:  # the caller reports these attributes
        return dict.fromkeys(found.maybe)
    return {state: (state.path, state.name) in again.set_by_calls.names for state in found.maybe}


def mark_states(graph: fx.Graph, outputs: Mapping[int, tuple[str, str]]) -> None:
    """Note at each input that is a state which output is its next value: `outputs`, of `ChangedAttributes.outputs`."""
    next_of = {name: place for place, (_, name) in outputs.items()}
    for node in graph.find_nodes(op="placeholder"):
        if STATE in node.meta:
            node.meta[STATE] = next_of.get(str(node.target), -1)


def leave_out(graph: fx.Graph, inputs: Inputs, unseen: Collection[str]) -> Inputs:
    """Remove states that forward does not read from a graph and its inputs, by the names of their arguments."""
    names = {leaf.name for leaf in inputs.leaves if leaf.argument in unseen}
    for node in graph.find_nodes(op="placeholder"):
        if node.target in names and not node.users:
            graph.erase_node(node)
    return inputs.without(unseen)
