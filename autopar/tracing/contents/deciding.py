"""Advice where the contents of a tensor are needed: the names of the inputs that it is computed from."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autopar.graph import STATE_OF
from autopar.tracing.errors import OR_LEAF

_MOST = 3  # inputs to name; a longer list does not help


def known_or_leaf(nodes: Iterable[fx.Node | None]) -> str:
    """The advice for tensors without data, given the nodes that made them."""
    sources = _inputs(nodes)
    states = list(dict.fromkeys(node.meta[STATE_OF] for node in sources if STATE_OF in node.meta))
    if states and all(STATE_OF in node.meta for node in sources):
        return (
            f"it depends on {' and '.join(map(repr, states[:_MOST]))}, a state that forward carries from call to call: "
            f"choose with torch.where, or by an argument that is not a tensor{OR_LEAF}"
        )
    names = [str(node.target) for node in sources if STATE_OF not in node.meta]
    inputs = " and ".join(map(repr, names)) if 0 < len(names) <= _MOST else "that input"
    return f"give {inputs} a known example (autopar.known){OR_LEAF}"


def _inputs(nodes: Iterable[fx.Node | None]) -> list[fx.Node]:
    """The placeholders that nodes are computed from, in the order of the graph."""
    waiting = [node for node in nodes if node is not None]
    met = dict.fromkeys(waiting)
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in met:
                met[node] = None
                waiting.append(node)
    graphs = dict.fromkeys(node.graph for node in met)
    return [node for graph in graphs for node in graph.nodes if node.op == "placeholder" and node in met]
