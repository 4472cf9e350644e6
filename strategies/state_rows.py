"""With `inputs="local"`: which states are batched, so that each rank holds its own rows, and along which dim.

The call that sets a state decides: if the value that it returns for the state has a batch dim, so has the state that
the next call is given. A state that one call is given and passes on to another state makes the other one's batch dim
known too, hence the iteration. What earlier calls have found (`ROWS`) takes precedence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopar.calls.state_rows import by_output
from autopar.graph import ROWS, STATE, TensorRef, tensor_of
from autopar.strategies import ends
from autopar.strategies.batch_dims import batch_dims
from autopar.strategies.strategy import Strategy


def split_states(
    graph: fx.Graph, strategies: dict[fx.Node, tuple[Strategy, ...]], mesh_shape: Sequence[int]
) -> dict[fx.Node, tuple[Strategy, ...]]:
    """`strategies` with those of batched states replaced; in the given ones every state is whole on each rank."""
    states = [node for node in graph.find_nodes(op="placeholder") if STATE in node.meta]
    if not states:
        return strategies
    updated = {
        **strategies,
        **{node: _split(node, node.meta[ROWS], mesh_shape) for node in states if ROWS in node.meta},
    }
    while True:
        dims = by_output(graph, batch_dims(graph, updated))
        new = {
            node: _split(node, dim, mesh_shape)
            for node in states
            if ROWS not in node.meta
            and (dim := dims.get(node.meta[STATE], -1)) >= 0
            and updated[node][0].outputs[0].is_replicated
        }
        new = {node: ways for node, ways in new.items() if ways != updated[node]}
        if not new:
            break
        updated.update(new)
    return updated


def _split(node: fx.Node, dim: int, mesh_shape: Sequence[int]) -> tuple[Strategy, ...]:
    shape = tuple(tensor_of(TensorRef(node, 0)).shape)
    is_even = 0 <= dim < len(shape) and shape[dim] % math.prod(mesh_shape) == 0
    return ends.placeholder(shape, tuple(mesh_shape), "local" if is_even else "global", dim)
