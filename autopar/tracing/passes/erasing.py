"""Erasing a node together with everything that only it used."""

from __future__ import annotations

from torch import fx


def graph_erase_node(graph: fx.Graph, node: fx.Node) -> int:
    """Erase `node`, and then every input of an erased node that nothing else uses; returns how many.

    Placeholders stay. Raises RuntimeError, as `fx.Graph.erase_node` does, if `node` itself has users.
    """
    waiting, erased = [node], 0
    while waiting:
        current = waiting.pop()
        inputs = current.all_input_nodes
        graph.erase_node(current)
        erased += 1
        waiting += [n for n in inputs if not n.users and n.op != "placeholder" and n not in waiting]
    return erased
