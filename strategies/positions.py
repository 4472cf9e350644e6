"""Which digits of which dims are worth splitting: candidates flow through the graph.

A dim may be sharded at many digit positions, few of which mean anything. A position is *useful* where an op with
factors of its own (a product, an attention, a norm, a loss: the table's anchors) or an input can split there; from
there it travels along the rules of the ops in between, forward and backward, to every tensor that it fits. So the
`h` of attention, seen through the views and the split of a fused qkv, becomes position 3 of the projection's
output and of its weight, while nothing asks to split the `e` beside it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.graph import TensorRef
from autopar.layout import fills
from autopar.strategies.bind import Bound, Spot
from autopar.strategies.members import Flow, Member, RuledOp, touching_nodes
from autopar.strategies.modes import Position

Spots = frozenset[Spot]


def useful_positions(
    members: Mapping[fx.Node, Member],
    sources: Iterable[tuple[TensorRef, Sequence[int]]],
    mesh_shape: Sequence[int],
    ragged: Mapping[fx.Node, Any],
) -> dict[fx.Node, Any]:
    """For each node the positions of its factors that are worth splitting, as a tuple of `Position`.

    `sources` are tensors with their shapes, every dim of which is a candidate (the graph's inputs); `ragged` the
    factors that may be cut into unequal pieces.
    """
    touching = touching_nodes(members)
    flow = _Candidates(mesh_shape)
    spots: dict[TensorRef, Spots] = dict.fromkeys(touching, flow.same(frozenset()))
    for ref, shape in sources:
        if ref in spots:
            spots[ref] = flow.same(frozenset(Spot(dim, 1) for dim, length in enumerate(shape) if length > 1))
    return flow.settle(members, touching, spots, ragged)


class _Candidates(Flow):
    """The flow of candidates, as spots of tensors; finds positions."""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        super().__init__()
        self.mesh_shape = mesh_shape

    def through(self, op: RuledOp, known: tuple[Spots, ...], given: Any) -> tuple[Any, tuple[Spots, ...]]:
        """`given`: the ragged factors."""
        bound, ragged = op.bound, given or frozenset()
        positions = {Position(f, 1) for f in range(len(bound.factors))} if op.anchor else set()
        positions.update(p for t, some in enumerate(known) for s in some if (p := position_at(bound, t, s)))
        useful = [p for p in sorted(positions) if can_cut(bound, p, self.mesh_shape, ragged)]
        after = []
        for t, before in enumerate(known):
            lies = [(spot, p.outer) for p in useful if (spot := bound.spots[t][p.factor]) is not None]
            after.append(self.same(before | {Spot(spot.dim, spot.outer * outer) for spot, outer in lies}))
        return tuple(useful), tuple(after)


def position_at(bound: Bound, tensor: int, spot: Spot) -> Position | None:
    """The factor of the op that a digit of one of its tensors falls into, and where in it."""
    for f, lies in enumerate(bound.spots[tensor]):
        if lies is not None and lies.dim == spot.dim and spot.outer % lies.outer == 0:
            inner = spot.outer // lies.outer
            if inner < bound.factors[f].size and bound.factors[f].size % inner == 0:
                return Position(f, inner)
    return None


def can_cut(bound: Bound, position: Position, mesh_shape: Sequence[int], ragged: Container[int]) -> bool:
    """Whether at least one axis can pick this digit; `ragged`: the factors that need not divide."""
    factor = bound.factors[position.factor]
    uneven = position.outer == 1 and position.factor in ragged
    return factor.splits_at(position.outer) and any(
        n > 1 and (factor.size % (position.outer * n) == 0 or (uneven and fills(factor.size, (n,)))) for n in mesh_shape
    )
