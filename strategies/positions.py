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
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.layout import fills
from autopar.strategies.bind import Bound, Spot
from autopar.strategies.modes import Position


class Member(NamedTuple):
    """A node in the flow: its bound rule, its tensors (inputs, then outputs), and whether it is an anchor."""

    bound: Bound
    tensors: tuple[TensorRef, ...]
    anchor: bool


def useful_positions(
    members: Mapping[fx.Node, Member],
    sources: Iterable[tuple[TensorRef, Sequence[int]]],
    mesh_shape: Sequence[int],
    ragged: Mapping[fx.Node, Container[int]],
) -> dict[fx.Node, tuple[Position, ...]]:
    """For each node the positions of its factors that are worth splitting.

    `sources` are tensors with their shapes, every dim of which is a candidate (the graph's inputs); `ragged` the
    factors that may be cut into unequal pieces.
    """
    touching: dict[TensorRef, list[fx.Node]] = {}
    for node, member in members.items():
        for ref in dict.fromkeys(member.tensors):
            touching.setdefault(ref, []).append(node)
    spots: dict[TensorRef, set[Spot]] = {ref: set() for ref in touching}
    for ref, shape in sources:
        if ref in spots:
            spots[ref].update(Spot(dim, 1) for dim, length in enumerate(shape) if length > 1)
    found: dict[fx.Node, set[Position]] = {}
    for node, member in members.items():
        own = range(len(member.bound.factors)) if member.anchor else ()
        here = [Position(f, 1) for f in own]
        found[node] = {p for p in here if can_cut(member.bound, p, mesh_shape, ragged.get(node, ()))}
    queue = deque(members)
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        bound, tensors, _ = members[node]
        positions = found[node]
        for t, ref in enumerate(tensors):
            for spot in spots[ref]:
                position = position_at(bound, t, spot)
                if position is None or position in positions:
                    continue
                if can_cut(bound, position, mesh_shape, ragged.get(node, ())):
                    positions.add(position)
        for t, ref in enumerate(tensors):
            known = spots[ref]
            before = len(known)
            for factor, outer in positions:
                lies = bound.spots[t][factor]
                if lies is not None:
                    known.add(Spot(lies.dim, lies.outer * outer))
            if len(known) > before:
                for other in touching[ref]:
                    if other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    return {node: tuple(sorted(positions)) for node, positions in found.items()}


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
