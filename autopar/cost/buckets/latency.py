"""The latency of buckets that the charges of their members do not cover.

Parameters of a block that move in the same way (the same kinds of collectives over the same axes) share a bucket, and
each is charged a part of its latency (`cost.buckets.buckets`). The parts of all parameters of a block add up to one
bucket. If they move in several ways w, each way is a bucket that takes its whole latency l_w
(`cost.collectives.least_latency` of its collectives), although its members' parts p_m add up to less than one. What is
missing is::

    l_w max(0, n - sum_{m in w} p_m)          n: the block's buckets of one way, mostly 1

With it the price of a bucket is a lower bound, since seconds are a concave function of bytes: the least latency is that
of the algorithm for the smallest messages. Gathers, gathers again in backward and reductions are separate ways.
Parameters that are charged a whole latency, because they are larger than a bucket or read in several regions, are left
out. Tiny parameters that are not gathered need no bucket of their own block, but their parts count in the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from autopar.resharding.path_edges import KINDS
from autopar.resharding.reshard import CollectiveKind, Move

if TYPE_CHECKING:
    from autopar.cost.buckets.buckets import Conversion
    from autopar.cost.buckets.grouping import Grouping

Phase = Literal["gathers", "again", "reductions"]


def way_number(moves: Iterable[Move], mesh_shape: Sequence[int]) -> int:
    """A number that encodes the kinds and axes of some moves, in order; 0 if nothing is sent."""
    number, base = 0, base_of(len(mesh_shape))
    for move in moves:
        if mesh_shape[move.axis] > 1:
            number = number * base + move_number(KINDS.index(move.kind), move.axis)
    return number


def base_of(axes: int) -> int:
    """The base of a way's number on a mesh of so many axes; its digits are the moves."""
    return len(KINDS) * axes + 1


def move_number(kind: int, axis: int) -> int:
    """The digit of a collective (`kind` is an index in KINDS); works on arrays too."""
    return len(KINDS) * axis + kind + 1


def moves_of(way: int, axes: int) -> list[tuple[CollectiveKind, int]]:
    """The kinds and axes of the moves that a way's number encodes.

    >>> moves_of(way_number([Move("all_gather", 1, 8), Move("all_gather", 0, 16)], (2, 2)), 2)
    [('all_gather', 1), ('all_gather', 0)]
    """
    moves: list[tuple[CollectiveKind, int]] = []
    while way:
        way, digit = divmod(way, base_of(axes))
        moves.append((KINDS[(digit - 1) % len(KINDS)], (digit - 1) // len(KINDS)))
    return moves[::-1]


class BucketLatency:
    """The missing latency of the conversions of a plan's parameters."""

    def __init__(self, conversions: Sequence[Conversion], grouping: Grouping, mesh_shape: Sequence[int]) -> None:
        self.grouping, self.mesh_shape = grouping, mesh_shape
        self._in: defaultdict[int, list[Conversion]] = defaultdict(list)
        for conversion in conversions:
            if grouping.in_one_block(conversion.ref.node):
                self._in[grouping.home(conversion.ref.node)].append(conversion)
        self._known: dict[tuple[int, Phase], dict[tuple[object, ...], float]] = {}

    def missing(self, conversion: Conversion, phase: Phase) -> float:
        """The part of a bucket's latency to add to a conversion's price, each time that it is charged in this phase.
        What its bucket lacks is divided evenly among the bucket's members."""
        if not self.grouping.in_one_block(conversion.ref.node):
            return 0.0
        key = self.grouping.home(conversion.ref.node), phase
        if key not in self._known:
            self._known[key] = self._shares(*key)
        return self._known[key].get(_key(conversion), 0.0)

    def _shares(self, region: int, phase: Phase) -> dict[tuple[object, ...], float]:
        """`missing` for every conversion of a region that has some."""
        ways: defaultdict[int, list[Conversion]] = defaultdict(list)
        for conversion in self._in[region]:
            if (way := self._way(conversion, phase)) and self.grouping.calls(conversion.ref, conversion.wanted) < 1:
                ways[way].append(conversion)
        missing = {}
        for members in ways.values():
            share = self._short(region, members, phase) / len(members)
            for conversion in members:
                missing[_key(conversion)] = share / max(1, conversion.kept) if phase == "again" else share
        return missing

    def _short(self, region: int, members: Sequence[Conversion], phase: Phase) -> float:
        """The number of buckets that some conversions of a region need, less the parts that they are charged."""
        calls = {(member.ref, member.wanted): self.grouping.calls(member.ref, member.wanted) for member in members}
        paid = sum(calls.values())
        if phase == "again":  # charged for each use that saves the parameter
            paid = sum(member.saved * calls[member.ref, member.wanted] for member in members)
        asks = any(
            self._way(member, "gathers") or not self.grouping.is_tiny(member.ref, member.wanted) for member in members
        )
        return max(0.0, self.grouping.buckets(region) - paid) if asks else 0.0

    def _way(self, conversion: Conversion, phase: Phase) -> int:
        """The way in which a conversion moves in a phase, 0 if it does not."""
        if phase == "reductions":
            moves = conversion.backward if conversion.enters else []
        else:
            moves = conversion.forward if phase == "gathers" or (conversion.regather and conversion.saved) else []
        return way_number(moves, self.mesh_shape)


def _key(conversion: Conversion) -> tuple[object, ...]:
    return conversion.ref, conversion.wanted, conversion.segment
