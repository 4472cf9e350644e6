"""Traces in which what forward carries from call to call in attributes is an input: it is found, and traced again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.calls.states import State
from autopar.graph import STATE
from autopar.tracing.calls.inputs import Inputs
from autopar.tracing.model_state.left_values import Look
from autopar.tracing.traced import Traced

Run = Callable[[Inputs], Traced]


def with_states(root: nn.Module, inputs: Inputs, run: Run, once: Run, known: Mapping[State, bool | None]) -> Traced:
    """The trace in which every state is an input: where one turns out to be there, the model is traced again.

    `run` traces, `once` does without making leaves of what cannot be traced. `known`: `Traced.set_again` of an earlier
    call.
    """
    set_again = {**known}
    while True:
        traced = run(inputs)
        new = {state: pytree.tree_map_only(torch.Tensor, _whole, state.read(root)) for state in traced.new_states}
        if not new and not traced.may_be_states.keys() <= set_again.keys():
            set_again |= _set_again(inputs, traced, once)
        may = {} if new else {state: (goes_on, set_again[state]) for state, goes_on in traced.may_be_states.items()}
        new |= {state: state.read(root) for state, found in may.items() if found == (True, True)}
        if not new:
            told = tuple(state.argument.partition(".")[2] for state, (_, again) in may.items() if again is not False)
            return replace(
                traced, attributes_set=traced.attributes_set + told, set_again=set_again, made_of_constants={}
            )
        inputs = inputs.with_states(new)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as an example; of a DTensor, as calls set for the loop, what it looks like."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _set_again(inputs: Inputs, traced: Traced, once: Run) -> dict[State, bool | None]:
    """Which attributes that may be states a second call sets anew, that finds what the first has left there.

    What is made of constants is a table that forward keeps, or a count: the second call tells. None where it is none
    that can be made.
    """
    left = traced.made_of_constants.items()
    found = {state: pytree.tree_map_only(Look, Look.made, value) for state, value in left}
    try:
        again = once(inputs.with_states(found))
    except Exception:  # whoever called tells of them
        return dict.fromkeys(traced.may_be_states)
    return {state: (state.path, state.name) in again.set_attributes for state in traced.may_be_states}


def mark_states(graph: fx.Graph, outputs: Mapping[int, tuple[str, str]]) -> None:
    """Note of inputs that are states which output the next call is given. `outputs`: as `Left.outputs` says."""
    next_of = {name: place for place, (_, name) in outputs.items()}
    for node in graph.find_nodes(op="placeholder"):
        if STATE in node.meta:
            node.meta[STATE] = next_of.get(str(node.target), -1)


def leave_out(graph: fx.Graph, inputs: Inputs, unseen: Collection[str]) -> Inputs:
    """Take states out of a graph and its inputs, by the names of their arguments, which forward does not look at."""
    names = {leaf.name for leaf in inputs.leaves if leaf.argument in unseen}
    for node in graph.find_nodes(op="placeholder"):
        if node.target in names and not node.users:
            graph.erase_node(node)
    return inputs.without(unseen)
