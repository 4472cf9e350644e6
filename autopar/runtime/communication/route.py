"""The order in which the buckets of a program are gathered, in forward and in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.cost.buckets.ahead import due_ahead
from autopar.runtime.communication.buckets import Bucket
from autopar.runtime.communication.convert import Stage

Handed = dict[Bucket, dict[int, tuple[Bucket, int]]]  # members of a bucket, each as a member of another


@dataclass(frozen=True)
class Stop:
    """A bucket where a call reads it. `segment`: -1 outside; `replayed`: whether its segment's replay reads it."""

    bucket: Bucket
    segment: int
    replayed: bool


@dataclass
class Route:
    """The buckets that are gathered, in the order of a call and of its backward."""

    forward: dict[Bucket, Bucket] = field(default_factory=dict)  # next bucket, by the one before
    backward: dict[Bucket, Bucket] = field(default_factory=dict)
    regathers: bool = False  # whether a bucket outside segments is gathered again
    longest: int = 0  # most collectives of one gather
    places: frozenset[int] = frozenset()  # in the state, of all members of buckets with collectives
    names: tuple[str, ...] = ()  # of the state
    read_bytes: dict[Bucket, int] = field(default_factory=dict)  # cache, filled by `Gathers`
    awaiting: dict[Bucket, frozenset[int]] = field(default_factory=dict)  # members in a later bucket of backward too
    runs: tuple[Sequence[Sequence[Bucket]], ...] = ((), ())  # by segment, in forward and in backward
    _handed: dict[bool, Handed] = field(default_factory=dict)

    def missing(self, bucket: Bucket, is_missing: Callable[[Bucket], bool]) -> Bucket | None:
        """The first missing bucket among those that backward gathers before `bucket`."""
        before = itertools.takewhile(lambda candidate: candidate is not bucket, self.backward)
        return next(filter(is_missing, before), None)

    @staticmethod
    def of(stops: Sequence[Stop], names: Sequence[str]) -> Route:
        gathering = [stop for stop in stops if stop.bucket.gathers]
        buckets = [stop.bucket for stop in gathering]
        runs: list[list[Stop]] = []
        for stop in gathering:
            if runs and runs[-1][0].segment == stop.segment:
                runs[-1].append(stop)
            else:
                runs.append([stop])
        back_runs: list[list[Bucket]] = []
        for run in reversed(runs):
            if run[0].segment < 0:
                back_runs.append([stop.bucket for stop in reversed(run) if stop.bucket.regathers])
            else:
                back_runs.append([stop.bucket for stop in run if stop.replayed])
        back = list(itertools.chain.from_iterable(back_runs))
        again = any(stop.bucket.regathers and stop.segment < 0 for stop in stops)
        longest = max((bucket.gathers for bucket in buckets), default=0)
        moving = (stop.bucket for stop in stops if stop.bucket.gathers or stop.bucket.reduces)
        places = frozenset(place for bucket in moving for place in bucket.places)
        forward, backward = (dict(itertools.pairwise(order)) for order in (buckets, back))
        awaiting = _awaiting(stops)
        both_runs = [[stop.bucket for stop in run] for run in runs], list(filter(None, back_runs))
        return Route(forward, backward, again, longest, places, tuple(names), awaiting=awaiting, runs=both_runs)

    def handed_on(self, gather: Callable[[Bucket], Any], *, backward: bool) -> Handed:
        """Members to pass on to buckets of the next run, whose gather would be launched while the members still exist.

        A run is a recomputed segment, or what lies between two segments. What a replay gathers exists until backward
        has finished the segment, so at least until the segment's last bucket has been read; any other member exists as
        long as its own bucket is in use. `gather`: gives a bucket in the form that `cost.buckets.ahead` takes.
        """
        if backward not in self._handed:
            self._handed[backward] = self._find_handed(gather, backward=backward)
        return self._handed[backward]

    def _find_handed(self, gather: Callable[[Bucket], Any], *, backward: bool) -> Handed:
        handed: Handed = {}
        order = list(itertools.chain.from_iterable(self.runs[backward]))
        for run, following in itertools.pairwise(self.runs[backward]):
            reads = {member: (later, i) for later in following for i, member in enumerate(_members(later))}
            for bucket in run:
                shared = {i: reads[member] for i, member in enumerate(_members(bucket)) if member in reads}
                if shared:
                    last = run[-1] if backward and bucket.in_segment else bucket
                    behind = map(gather, order[order.index(last) + 1 :])
                    due = {later.bucket for later, _ in due_ahead(gather(last), behind, self.longest, read=True)}
                    handed[bucket] = {i: later for i, later in shared.items() if later[0] in due}
        return handed


def _members(bucket: Bucket) -> list[tuple[int, Stage]]:
    return list(zip(bucket.places, bucket.stages, strict=True))


def _awaiting(stops: Sequence[Stop]) -> dict[Bucket, frozenset[int]]:
    """Members of buckets whose gradients another bucket, later in backward, reduces in the same way: recomputed blocks
    that share parameters have a bucket each."""
    awaiting: dict[Bucket, frozenset[int]] = {}
    reduced: set[tuple[int, Stage]] = set()
    for bucket in dict.fromkeys(stop.bucket for stop in stops if stop.bucket.reduces):
        members = _members(bucket)
        if again := frozenset(i for i, member in enumerate(members) if member in reduced):
            awaiting[bucket] = again
        reduced.update(members)
    return awaiting
