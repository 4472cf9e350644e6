"""Along which dims rows lie, of which each rank has its own with `inputs="local"`: of states, and of later inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.graph import ROWS, resolve


def by_output(graph: fx.Graph, batch_dims: Sequence[int]) -> dict[int, int]:
    """The dims of a plan by places among the flat outputs; those that are no tensors have none."""
    leaves = graph.output_node().args[0]
    assert isinstance(leaves, (tuple, list))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and resolve(leaf)]
    return dict(zip(tensors, batch_dims, strict=True)) if batch_dims else {}


def note_rows(graph: fx.Graph, rows: Mapping[str, int]) -> None:
    """Note how states lie that other calls have left or are given, and which inputs are no rows, by their names."""
    for node in graph.find_nodes(op="placeholder"):
        if node.target in rows:
            node.meta[ROWS] = rows[str(node.target)]
