"""Removing nodes without users and without effects."""

from __future__ import annotations

from torch import fx

from autopar.leaf_calls import LeafCall

WRITES = "writes"  # key in node.meta: {argument node: data-free value after the call}, for tensors written in place


def remove_dead_nodes(graph: fx.Graph) -> int:
    """Erase, from last to first, every node without users that has no effect; returns how many."""
    erased = 0
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output") or node.users or has_effect(node):
            continue
        graph.erase_node(node)
        erased += 1
    return erased


def has_effect(node: fx.Node) -> bool:
    """Whether running the node does more than compute its value."""
    return WRITES in node.meta or node.op == "call_module" or isinstance(node.target, LeafCall)
