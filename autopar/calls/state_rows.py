"""Dims of states and later inputs that hold batch rows: with `inputs="local"`, each rank has a part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.graph import ROWS, resolve


def by_output(graph: fx.Graph, batch_dims: Sequence[int]) -> dict[int, int]:
    """A plan's batch dims by position among the flat outputs; outputs that are no tensors are left out."""
    leaves = graph.output_node().args[0]
    assert isinstance(leaves, (tuple, list))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and resolve(leaf)]
    return dict(zip(tensors, batch_dims, strict=True)) if batch_dims else {}


def note_rows(graph: fx.Graph, rows: Mapping[str, int]) -> None:
    """Note in the graph the row dim of each state and later input in `rows` (by name); -1 says that it has no rows."""
    for node in graph.find_nodes(op="placeholder"):
        if node.target in rows:
            node.meta[ROWS] = rows[str(node.target)]
