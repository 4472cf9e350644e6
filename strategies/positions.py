"""Which digits of which dims are worth splitting: candidates flow through the graph.

A dim may be sharded at many digit positions, few of which mean anything. A position is *useful* where an op with
factors of its own (a product, an attention, a norm, a loss: the table's anchors) or an input can split there; from
there it travels along the rules of the ops in between, forward and backward, to every tensor that it fits. So the
`h` of attention, seen through the views and the split of a fused qkv, becomes position 3 of the projection's
output and of its weight, while nothing asks to split the `e` beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.layout import fills
from autopar.strategies.bind import Bound, Spot
from autopar.strategies.modes import Position, TensorFact

Spots = frozenset[Spot]


@dataclass(frozen=True, eq=False)
class RuledOp:
    """What equal nodes share: their bound rule, the facts of their tensors (inputs, then outputs), whether they are
    anchors, and whether the rule is the table's. Equality is identity: what follows from it is found once."""

    bound: Bound
    facts: tuple[TensorFact, ...]
    anchor: bool
    of_table: bool


class Member(NamedTuple):
    """A node in the flow: what it shares with its like, and its tensors (inputs, then outputs)."""

    op: RuledOp
    tensors: tuple[TensorRef, ...]

    @property
    def bound(self) -> Bound:
        return self.op.bound


def useful_positions(
    members: Mapping[fx.Node, Member],
    sources: Iterable[tuple[TensorRef, Sequence[int]]],
    mesh_shape: Sequence[int],
    ragged: Mapping[fx.Node, frozenset[int]],
) -> dict[fx.Node, tuple[Position, ...]]:
    """For each node the positions of its factors that are worth splitting.

    `sources` are tensors with their shapes, every dim of which is a candidate (the graph's inputs); `ragged` the
    factors that may be cut into unequal pieces.
    """
    touching = touching_nodes(members)
    flow = _Flow(mesh_shape)
    spots: dict[TensorRef, Spots] = dict.fromkeys(touching, flow.same(frozenset()))
    for ref, shape in sources:
        if ref in spots:
            spots[ref] = flow.same(frozenset(Spot(dim, 1) for dim, length in enumerate(shape) if length > 1))
    found: dict[fx.Node, tuple[Position, ...]] = {}
    queue = deque(members)
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        op, tensors = members[node]
        known = tuple(map(spots.__getitem__, tensors))
        found[node], after = flow.through(op, ragged.get(node, frozenset()), known)
        for ref, before, now in zip(tensors, known, after, strict=True):
            if now is not before:
                spots[ref] = flow.same(spots[ref] | now)
                for other in touching[ref]:
                    if other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    return found


def touching_nodes(members: Mapping[fx.Node, Member]) -> dict[TensorRef, list[fx.Node]]:
    """The nodes that read or make each tensor."""
    found: dict[TensorRef, list[fx.Node]] = {}
    for node, member in members.items():
        for ref in dict.fromkeys(member.tensors):
            found.setdefault(ref, []).append(node)
    return found


class _Flow:
    """What candidates do at an op, found once for equal ops whose tensors have the same candidates: sets only grow, so
    that the order of visits does not matter, and equal blocks end with equal ones."""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        self.mesh_shape = mesh_shape
        self._same: dict[Spots, Spots] = {}
        self._through: dict[tuple[object, ...], tuple[tuple[Position, ...], tuple[Spots, ...]]] = {}

    def same(self, spots: Spots) -> Spots:
        """The one object for a set of candidates."""
        return self._same.setdefault(spots, spots)

    def through(
        self, op: RuledOp, ragged: frozenset[int], spots: tuple[Spots, ...]
    ) -> tuple[tuple[Position, ...], tuple[Spots, ...]]:
        """The positions of an op whose tensors have these candidates, and what candidates they have then."""
        key = op, ragged, spots
        found = self._through.get(key)
        if found is None:
            bound = op.bound
            positions = {Position(f, 1) for f in range(len(bound.factors))} if op.anchor else set()
            positions.update(p for t, some in enumerate(spots) for s in some if (p := position_at(bound, t, s)))
            useful = [p for p in sorted(positions) if can_cut(bound, p, self.mesh_shape, ragged)]
            after = []
            for t, known in enumerate(spots):
                lies = [(spot, p.outer) for p in useful if (spot := bound.spots[t][p.factor]) is not None]
                after.append(self.same(known | {Spot(spot.dim, spot.outer * outer) for spot, outer in lies}))
            found = self._through[key] = tuple(useful), tuple(after)
        return found


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
