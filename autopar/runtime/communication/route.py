"""In which order the buckets of a program gather, in its forward and in its backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.runtime.communication.buckets import Bucket
from autopar.runtime.communication.convert import Stage


@dataclass(frozen=True)
class Stop:
    """A bucket where a call meets it; `segment` -1: outside; `replayed`: whether a replay of its segment does too."""

    bucket: Bucket
    segment: int
    replayed: bool


@dataclass
class Route:
    """The buckets that gather, in the order in which a call and its backward gather them."""

    forward: dict[Bucket, Bucket] = field(default_factory=dict)  # by the one before
    backward: dict[Bucket, Bucket] = field(default_factory=dict)
    again: bool = False  # whether any outside segments is gathered again
    longest: int = 0  # the most collectives that one takes
    places: frozenset[int] = frozenset()  # in the state, of all members of buckets that move
    names: tuple[str, ...] = ()  # of the state
    read_bytes: dict[Bucket, int] = field(default_factory=dict)  # of those that were asked for already
    awaiting: dict[Bucket, frozenset[int]] = field(default_factory=dict)  # members that a later one in backward has too

    def missing(self, bucket: Bucket, is_missing: Callable[[Bucket], bool]) -> Bucket | None:
        """The first bucket that is missing of those that backward gathers before one."""
        before = itertools.takewhile(lambda one: one is not bucket, self.backward)
        return next(filter(is_missing, before), None)

    @staticmethod
    def of(stops: Sequence[Stop], names: Sequence[str]) -> Route:
        gathering = [stop for stop in stops if stop.bucket.gathers]
        there = [stop.bucket for stop in gathering]
        runs: list[list[Stop]] = []
        for stop in gathering:
            if runs and runs[-1][0].segment == stop.segment:
                runs[-1].append(stop)
            else:
                runs.append([stop])
        back: list[Bucket] = []
        for run in reversed(runs):
            if run[0].segment < 0:
                back += [stop.bucket for stop in reversed(run) if stop.bucket.again]
            else:
                back += [stop.bucket for stop in run if stop.replayed]
        again = any(stop.bucket.again and stop.segment < 0 for stop in stops)
        longest = max((bucket.gathers for bucket in there), default=0)
        moving = (stop.bucket for stop in stops if stop.bucket.gathers or stop.bucket.reduces)
        places = frozenset(place for bucket in moving for place in bucket.places)
        forward, backward = (dict(itertools.pairwise(order)) for order in (there, back))
        return Route(forward, backward, again, longest, places, tuple(names), awaiting=_awaiting(stops))


def _awaiting(stops: Sequence[Stop]) -> dict[Bucket, frozenset[int]]:
    """Members of buckets that are reduced alike in another one, which backward comes to later: blocks that share
    parameters have a bucket each where they are recomputed."""
    found: dict[Bucket, frozenset[int]] = {}
    reduced: set[tuple[int, Stage]] = set()
    for bucket in dict.fromkeys(stop.bucket for stop in stops if stop.bucket.reduces):
        members = list(zip(bucket.places, bucket.stages, strict=True))
        if again := frozenset(i for i, member in enumerate(members) if member in reduced):
            found[bucket] = again
        reduced.update(members)
    return found
