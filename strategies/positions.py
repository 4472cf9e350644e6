"""Which digits of which dims are worth splitting: candidates flow through the graph.

A dim may be sharded at many digit positions (`autopar.layout`), most of which are useless. A position is *useful* where
an input, or an op with factors of its own (a product, an attention, a norm, a loss: the table's anchors), can be split
there; from there it travels along the rules of the ops in between, forward and backward, to every tensor that it fits.
So the `h` of attention, seen through the views and the split of a fused qkv, becomes position 3 of the projection's
output and of its weight, while nothing asks to split the `e` beside it.

Where two views cut the same elements at different places, a digit inside a factor may be moved to a place where no
anchor's factor begins. A loop of such views moves it again and again, until every bit of a dim is a position (22 of one
op in ProphetNet; the number of strategies is this to the power of the mesh's axes). So the number of moves is bounded:
`_MOVES` for each candidate, and `_ON_MANY` on meshes with three or more axes of more than one device.
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

_MOVES, _ON_MANY = 3, 1

Spots = frozenset[tuple[Spot, int]]  # candidates, each with how often it was moved inside a factor


def useful_positions(
    members: Mapping[fx.Node, Member],
    sources: Iterable[tuple[TensorRef, Sequence[int]]],
    mesh_shape: Sequence[int],
    ragged: Mapping[fx.Node, Any],
) -> dict[fx.Node, Any]:
    """For each node the positions of its factors that are worth splitting, as a tuple of `Position`.

    `sources`: the graph's inputs with their shapes; each of their dims is a candidate. `ragged`: for each member the
    factors that may be cut into unequal pieces.
    """
    touching = touching_nodes(members)
    flow = _Candidates(mesh_shape)
    spots: dict[TensorRef, Spots] = dict.fromkeys(touching, flow.interned(frozenset()))
    for ref, shape in sources:
        if ref in spots:
            spots[ref] = flow.interned(frozenset((Spot(dim, 1), 0) for dim, length in enumerate(shape) if length > 1))
    return flow.settle(members, touching, spots, ragged)


class _Candidates(Flow):
    """Propagates candidates: the set of a tensor has its spots; the result for an op is its useful positions."""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        super().__init__()
        self.mesh_shape = mesh_shape
        self.moves = _MOVES if sum(n > 1 for n in mesh_shape) <= 2 else _ON_MANY

    def through(self, op: RuledOp, current: tuple[Spots, ...], extra: Any) -> tuple[Any, tuple[Spots, ...]]:
        """The useful positions of an op, and its tensors' spots with these added; `extra`: its ragged factors."""
        bound, ragged = op.bound, extra or frozenset()
        positions = {(Position(f, 1), 0) for f in range(len(bound.factors))} if op.anchor else set()
        for t, spots in enumerate(current):
            for spot, moves in spots:
                p = position_at(bound, t, spot)
                if p is not None and (total := moves + _is_moved(bound, p)) <= self.moves:
                    positions.add((p, total))
        useful = [(p, moves) for p, moves in sorted(positions) if can_cut(bound, p, self.mesh_shape, ragged)]
        after = []
        for t, before in enumerate(current):
            spots_moved = [
                (spot_of_factor, p.outer, moves)
                for p, moves in useful
                if (spot_of_factor := bound.spots[t][p.factor]) is not None
            ]
            after.append(
                self.interned(before | {(Spot(s.dim, s.outer * outer), moves) for s, outer, moves in spots_moved})
            )
        return tuple(dict.fromkeys(p for p, _ in useful)), tuple(after)


def _is_moved(bound: Bound, position: Position) -> bool:
    """Whether a digit is inside a factor that has different `outer` in different tensors, so that passing through the
    op moves the digit."""
    places = (spots[position.factor] for spots in bound.spots)
    return position.outer > 1 and len({place.outer for place in places if place is not None}) > 1


def position_at(bound: Bound, tensor: int, spot: Spot) -> Position | None:
    """The position (factor, and `outer` within it) that a digit of tensor number `tensor` is for the op, if any."""
    for f, spot_of_factor in enumerate(bound.spots[tensor]):
        if spot_of_factor is not None and spot_of_factor.dim == spot.dim and spot.outer % spot_of_factor.outer == 0:
            inner = spot.outer // spot_of_factor.outer
            if inner < bound.factors[f].size and bound.factors[f].size % inner == 0:
                return Position(f, inner)
    return None


def can_cut(bound: Bound, position: Position, mesh_shape: Sequence[int], ragged: Container[int]) -> bool:
    """Whether at least one mesh axis can split at this position; `ragged`: the factors whose length need not divide."""
    factor = bound.factors[position.factor]
    uneven = position.outer == 1 and position.factor in ragged
    return factor.splits_at(position.outer) and any(
        n > 1 and (factor.size % (position.outer * n) == 0 or (uneven and fills(factor.size, (n,)))) for n in mesh_shape
    )
