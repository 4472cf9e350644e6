"""Traces in which what forward carries from call to call in attributes is an input: it is found, and traced again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import STATE
from autopar.states import State
from autopar.tracing.inputs import Inputs
from autopar.tracing.left_values import Look
from autopar.tracing.traced import Traced

Run = Callable[[Inputs], Traced]


def with_states(root: nn.Module, inputs: Inputs, run: Run, once: Run) -> Traced:
    """The trace in which every state is an input: where one turns out to be there, the model is traced again.

    `run` traces, `once` does without making leaves of what cannot be traced.
    """
    traced = run(inputs)
    told = list[str]()
    while True:
        new = {state: pytree.tree_map_only(torch.Tensor, _whole, state.read(root)) for state in traced.new_states}
        if not new and traced.may_be_states:
            again, unknown = _set_again(inputs, traced, once)
            told += unknown
            new = {state: state.read(root) for state in again}
        if not new:
            return replace(traced, attributes_set=(*traced.attributes_set, *told)) if told else traced
        inputs = inputs.with_states(new)
        traced = run(inputs)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as an example; of a DTensor, as calls set for the loop, what it looks like."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _set_again(inputs: Inputs, traced: Traced, once: Run) -> tuple[list[State], list[str]]:
    """Which attributes a second call sets anew, that finds what the first has left there; and names where none runs.

    What is made of constants where nothing was is a table that forward keeps, or a count: the second call tells.
    """
    left = traced.made_of_constants.items()
    found = {state: pytree.tree_map_only(Look, Look.made, value) for state, value in left}
    try:
        again = once(inputs.with_states(found))
    except Exception:  # it reads their contents, or is no call that can be made: whoever called tells of them
        return [], [state.argument.partition(".")[2] for state in traced.may_be_states]
    return [state for state in traced.may_be_states if (state.path, state.name) in again.set_attributes], []


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
