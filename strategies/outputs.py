"""What the tensors that a model returns may be wanted as: few choices, each of which means something.

Dims of different tensors are the same index where the rules of the ops between them say so: the batch of logits and
of every cached key is one index, the sequence another. An axis that shards the outputs picks an index, in every tensor
that has it, and with it others that meet in no tensor: the vocabulary of logits and the heads of each layer's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.modes import Position
from autopar.strategies.positions import Member


class Place(NamedTuple):
    """A digit position of a tensor's dim."""

    tensor: TensorRef
    dim: int
    outer: int


def choices(
    tensors: Sequence[TensorRef],
    dims: Sequence[Iterable[int]],
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, Sequence[Position]],
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


def _indices(members: Mapping[fx.Node, Member], positions: Mapping[fx.Node, Sequence[Position]]) -> dict[Place, Place]:
    """A forest over places; those in one tree are the same index."""
    parent: dict[Place, Place] = {}
    for node, (bound, tensors, _) in members.items():
        for factor, outer in positions[node]:
            first: Place | None = None
            for ref, spots in zip(tensors, bound.spots, strict=True):
                spot = spots[factor]
                if spot is not None:
                    root = _root(parent, Place(ref, spot.dim, spot.outer * outer))
                    first = first or root
                    parent[root] = first
    return parent


def _root(parent: dict[Place, Place], place: Place) -> Place:
    while (above := parent.get(place, place)) != place:
        parent[place] = parent.get(above, above)
        place = above
    return place
