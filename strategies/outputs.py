"""What the tensors that a model returns may be wanted as: few choices, each of which means something.

Dims of different tensors are the same index where the rules of the ops between them say so: the batch of logits and
of every cached key is one index, the sequence another. An axis that shards the outputs picks an index, in every tensor
that has it, and with it others that meet in no tensor: the vocabulary of logits and the heads of each layer's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.members import Member, RuledBlock
from autopar.strategies.modes import Position


class Place(NamedTuple):
    """A digit position of a tensor's dim."""

    tensor: TensorRef
    dim: int
    outer: int


def choices(
    tensors: Sequence[TensorRef],
    dims: Sequence[Iterable[int]],
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, Any],
) -> list[tuple[int, ...]]:
    """Ways for one axis to shard the returned `tensors`: a dim for each, -1 for whole. `dims`: those worth it."""
    index = _indices(members, positions)
    holders: dict[Place, dict[int, int]] = {}
    for t, (ref, useful) in enumerate(zip(tensors, dims, strict=True)):
        for dim in useful:
            holders.setdefault(_root(index, Place(ref, dim, 1)), {}).setdefault(t, dim)
    packed: list[dict[int, int]] = []
    for held in sorted(holders.values(), key=len, reverse=True):
        room = next((pack for pack in packed if not pack.keys() & held.keys()), None)
        if room is None:
            packed.append(dict(held))
        else:
            room.update(held)
    return [(-1,) * len(tensors), *(tuple(pack.get(t, -1) for t in range(len(tensors))) for pack in packed)]


def _indices(members: Mapping[fx.Node, Member], positions: Mapping[fx.Node, Any]) -> dict[Place, Place]:
    """A forest over places; those in one tree are the same index."""
    parent: dict[Place, Place] = {}
    lies: dict[tuple[object, ...], list[list[tuple[int, int, int]]]] = {}
    for node, (op, tensors) in members.items():
        key = op, positions[node]
        if key not in lies:
            lies[key] = (
                _where_outside(op, positions[node])
                if isinstance(op, RuledBlock)
                else [_where(op.bound, position) for position in positions[node]]
            )
        for places in lies[key]:
            first: Place | None = None
            for t, dim, outer in places:
                root = _root(parent, Place(tensors[t], dim, outer))
                if first is None:
                    first = root
                elif root is not first:
                    parent[root] = first
    return parent


def _where_outside(block: RuledBlock, positions: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Where each index of a block lies in the tensors that others make or touch too, as `_where` tells of one digit."""
    index = _indices(block.members, dict(zip(block.members, positions, strict=True)))
    number = {ref: t for t, ref in enumerate(block.outer)}
    found: dict[Place, list[tuple[int, int, int]]] = {}
    for place in dict.fromkeys([*index, *index.values()]):
        if place.tensor in number:
            found.setdefault(_root(index, place), []).append((number[place.tensor], place.dim, place.outer))
    return list(found.values())


def _where(bound: Bound, position: Position) -> list[tuple[int, int, int]]:
    """Where a digit lies: the number of a tensor, its dim, and what stands before."""
    spots = [(t, some[position.factor]) for t, some in enumerate(bound.spots)]
    return [(t, spot.dim, spot.outer * position.outer) for t, spot in spots if spot is not None]


def _root(parent: dict[Place, Place], place: Place) -> Place:
    while (above := parent.get(place, place)) != place:
        parent[place] = parent.get(above, above)
        place = above
    return place
