"""Advice where the contents of a tensor are needed: the names of the inputs, states or buffers that decide."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from autopar.graph import STATE_OF, VAL
from autopar.tracing.errors import OR_LEAF

_MOST = 3  # inputs to name; a longer list does not help


def known_or_leaf(nodes: Iterable[fx.Node | None]) -> str:
    """The advice for tensors without data, given the nodes that made them."""
    nodes = list(nodes)
    sources = _sources(nodes, "placeholder")
    states = list(dict.fromkeys(node.meta[STATE_OF] for node in sources if STATE_OF in node.meta))
    if states and all(STATE_OF in node.meta for node in sources):
        return (
            f"it depends on {' and '.join(map(repr, states[:_MOST]))}, a state that forward carries from call to call: "
            f"choose with torch.where, or by an argument that is not a tensor{OR_LEAF}"
        )
    if not sources and (own := _of_the_model(nodes)):
        return f"{own}{OR_LEAF}"
    names = [str(node.target) for node in sources if STATE_OF not in node.meta]
    inputs = " and ".join(map(repr, names)) if 0 < len(names) <= _MOST else "that input"
    return f"give {inputs} a known example (autopar.known){OR_LEAF}"


def _of_the_model(nodes: Iterable[fx.Node | None]) -> str:
    """The advice for what depends on no input; "" if no buffer or parameter decides either."""
    found = _sources(nodes, "get_attr")
    buffers = [node for node in found if not isinstance(node.meta.get(VAL), torch.nn.Parameter)]
    names = " and ".join(repr(str(node.target)) for node in (buffers or found)[:_MOST])
    if buffers:
        return (
            f"it depends on the buffer {names}, and planning reads only small buffers of integers or truth values that "
            "forward does not write: make it one; if forward initialises something by its first batch, also run one "
            "batch through the model before planning; else choose with torch.where"
        )
    return f"it depends on the parameter {names}: choose with torch.where" if names else ""


def _sources(nodes: Iterable[fx.Node | None], op: str) -> list[fx.Node]:
    """The nodes of this kind ("placeholder", "get_attr") that others are computed from, in the order of the graph."""
    waiting = [node for node in nodes if node is not None]
    met = dict.fromkeys(waiting)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in met:
                met[node] = None
                waiting.append(node)
    graphs = dict.fromkeys(node.graph for node in met)
    return [node for graph in graphs for node in graph.nodes if node.op == op and node in met]
