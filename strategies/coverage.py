"""Coverage of a graph by rules: which ops have one, and which kinds of indices each op can be split on.

An index is *batch-like* if it comes from dim 0 of an input, *sequence-like* if from another dim of an input, and
*inner* otherwise: heads, features, experts, a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import fx

from autopar.graph import VAL, TensorRef
from autopar.strategies.bind import Spot
from autopar.strategies.constant import constants
from autopar.strategies.derive import positions_of
from autopar.strategies.members import RuledOp
from autopar.strategies.positions import position_at
from autopar.strategies.ruled import unruled
from autopar.strategies.table import bound_rule_or_none

Source = Literal["rule", "discovered", "none"]
Kind = Literal["batch", "sequence", "inner"]


class Coverage(NamedTuple):
    """One op: where its rule comes from, and the kinds of indices on which some axis of the mesh can split it."""

    source: Source
    kinds: frozenset[Kind]


def coverage(graph: fx.Graph, mesh_shape: Sequence[int]) -> dict[fx.Node, Coverage]:
    """The coverage of each op of an annotated graph; ops that compute constants are left out."""
    members, positions = positions_of(graph, mesh_shape)
    spots: dict[TensorRef, dict[Spot, Kind]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get(VAL), torch.Tensor):
            dims = range(node.meta[VAL].dim())
            spots[TensorRef(node, 0)] = {Spot(dim, 1): "sequence" if dim else "batch" for dim in dims}
    covered: dict[fx.Node, Coverage] = {}
    for node, (op, tensors) in members.items():
        assert isinstance(op, RuledOp)
        bound = op.bound
        kinds: set[Kind] = set()
        for position in positions[node]:
            kind: Kind = "inner"
            for t, ref in enumerate(tensors[: bound.inputs]):
                for spot, kind_of_spot in spots.get(ref, {}).items():
                    if position_at(bound, t, spot) == position and kind != "batch":
                        kind = kind_of_spot
            kinds.add(kind)
            for ref, spots_of_output in zip(tensors[bound.inputs :], bound.spots[bound.inputs :], strict=True):
                spot_of = spots_of_output[position.factor]
                if spot_of is not None and kind != "inner":
                    spots.setdefault(ref, {})[Spot(spot_of.dim, spot_of.outer * position.outer)] = kind
        source: Source = "rule" if bound_rule_or_none(node) is not None else "discovered"
        covered[node] = Coverage(source, frozenset(kinds))
    covered.update(dict.fromkeys(unruled(graph, constants(graph), members), Coverage("none", frozenset())))
    return covered
