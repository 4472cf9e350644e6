"""How one mesh axis may shard the tensors that a model returns: a few choices in place of every combination of dims.

Dims of different tensors are the same index where the rules of the ops between them say so: the batch dims of the
logits and of every cached key are one index, the sequence dims another. An axis shards one index in every tensor that
has it. The same choice also shards further indices whose tensors are all different ones: the vocabulary of the logits
together with the heads of each layer's keys.
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
    """A digit position of a dim of one tensor."""

    tensor: TensorRef
    dim: int
    outer: int


def choices(
    tensors: Sequence[TensorRef],
    dims: Sequence[Iterable[int]],
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, Any],
) -> list[tuple[int, ...]]:
    """The choices of one axis for the returned `tensors`: a dim for each tensor, or -1 to keep it whole.

    `dims`: for each tensor the dims that some strategy of its producer shards.
    """
    index = _indices(members, positions)
    holders: dict[Place, dict[int, int]] = {}
    for t, (ref, useful) in enumerate(zip(tensors, dims, strict=True)):
        for dim in useful:
            holders.setdefault(_root(index, Place(ref, dim, 1)), {}).setdefault(t, dim)
    packed: list[dict[int, int]] = []
    for dim_of_tensor in sorted(holders.values(), key=len, reverse=True):
        room = next((pack for pack in packed if not pack.keys() & dim_of_tensor.keys()), None)
        if room is None:
            packed.append(dict(dim_of_tensor))
        else:
            room.update(dim_of_tensor)
    return [(-1,) * len(tensors), *(tuple(pack.get(t, -1) for t in range(len(tensors))) for pack in packed)]


def _indices(members: Mapping[fx.Node, Member], positions: Mapping[fx.Node, Any]) -> dict[Place, Place]:
    """A union-find forest over places: places in one tree are the same index."""
    parent: dict[Place, Place] = {}
    places_of_op: dict[tuple[object, ...], list[list[tuple[int, int, int]]]] = {}
    for node, (op, tensors) in members.items():
        key = op, positions[node]
        if key not in places_of_op:
            places_of_op[key] = (
                _where_outside(op, positions[node])
                if isinstance(op, RuledBlock)
                else [_spots_of(op.bound, position) for position in positions[node]]
            )
        for places in places_of_op[key]:
            first: Place | None = None
            for t, dim, outer in places:
                root = _root(parent, Place(tensors[t], dim, outer))
                if first is None:
                    first = root
                elif root is not first:
                    parent[root] = first
    return parent


def _where_outside(block: RuledBlock, positions: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Where each index of a block lies in the block's outer tensors, in the form that `_spots_of` returns for one
    digit."""
    index = _indices(block.members, dict(zip(block.members, positions, strict=True)))
    number = {ref: t for t, ref in enumerate(block.outer)}
    places_of_root: dict[Place, list[tuple[int, int, int]]] = {}
    for place in dict.fromkeys([*index, *index.values()]):
        if place.tensor in number:
            places_of_root.setdefault(_root(index, place), []).append((number[place.tensor], place.dim, place.outer))
    return list(places_of_root.values())


def _spots_of(bound: Bound, position: Position) -> list[tuple[int, int, int]]:
    """Where a digit lies in each tensor that has it: the tensor's number, the dim, and the digit's `outer` in it."""
    spots = [(t, spots_of_factors[position.factor]) for t, spots_of_factors in enumerate(bound.spots)]
    return [(t, spot.dim, spot.outer * position.outer) for t, spot in spots if spot is not None]


def _root(parent: dict[Place, Place], place: Place) -> Place:
    while (above := parent.get(place, place)) != place:
        parent[place] = parent.get(above, above)
        place = above
    return place
