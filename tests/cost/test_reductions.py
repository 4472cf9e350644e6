"""Which reductions are waited for: the memory they hold is bounded, and the last of several has a block's time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.buckets.reductions import HELD, SMALL, due


@dataclass
class Sent:
    """A bucket whose collectives get inputs of these sizes in bytes, one after another; the last is no all-reduce."""

    sizes: list[int]
    launched: int = 1
    landed: bool = False
    turns: list[int] = field(default_factory=list)  # turns at which its collectives were waited for

    @property
    def handed_bytes(self) -> int:
        return self.sizes[0]

    @property
    def under_way_bytes(self) -> int:
        return self.sizes[self.launched - 1]

    @property
    def goes_on(self) -> bool:
        return self.launched < len(self.sizes)

    @property
    def holds_more(self) -> bool:
        return not self.landed

    def land(self, turn: int) -> None:
        self.turns.append(turn)
        self.landed = not self.goes_on
        self.launched += self.goes_on


def run(buckets: list[list[int]]) -> list[Sent]:
    flights: list[Sent] = []
    for turn, sizes in enumerate(buckets):
        for one in due(flights, sizes[0]):
            assert one.holds_more
            one.land(turn)
        beside = [one for one in flights if one.holds_more and one.handed_bytes < SMALL * sizes[0]]
        assert all(one.launched > 1 for one in beside)  # only the bucket whose turn it is holds gradients
        older = [one for one in beside if one.turns[-1] != turn]
        if older:
            assert sum(one.under_way_bytes for one in beside) <= sizes[0] // HELD
        flights.append(Sent(list(sizes)))
    return flights


@given(st.lists(st.integers(1, 4096), max_size=30))
def test_small_buckets_hold_no_more_than_large_ones(sizes: list[int]) -> None:
    """At its turn a bucket holds its gradients and as much input; for the largest bucket that is the maximum."""
    flights: list[Sent] = []
    for turn, size in enumerate(sizes):
        for one in due(flights, size):
            one.land(turn)
        under_way = sum(one.under_way_bytes for one in flights if one.holds_more)
        assert under_way + 2 * size <= 2 * max(sizes[: turn + 1])
        flights.append(Sent([size]))


def test_what_comes_soon_behind_a_large_bucket_leaves_it_time() -> None:
    """Buckets of experts and attention in alternation: each reduction has the time of a block."""
    flights = run([[352], [84]] * 4)
    assert [one.turns for one in flights[:-2]] == [[2], [2], [4], [4], [6], [6]]


@given(st.lists(st.tuples(st.integers(1, 4096), st.lists(st.sampled_from([2, 4, 8]), max_size=2)), max_size=30))
def test_what_is_held_stays_bounded(drawn: list[tuple[int, list[int]]]) -> None:
    buckets = []
    for size, ranks in drawn:
        sizes = [size]
        for n in ranks:
            sizes.append(max(1, sizes[-1] // n))
        buckets.append(sizes)
    run(buckets)


def test_a_single_collective_ends_at_the_next_turn() -> None:
    assert [one.turns for one in run([[64], [64], [64]])] == [[1], [2], []]


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_last_of_two_has_longer_than_from_one_bucket_to_the_next(ranks: int) -> None:
    """For equal buckets, the number of later collectives under way at once is as many as fit into half of a bucket."""
    found = run([[4096, 4096 // ranks]] * 18)
    assert all(one.turns[0] == i + 1 for i, one in enumerate(found[:-1]))
    assert {one.turns[1] - one.turns[0] for one in found if len(one.turns) == 2} == {ranks // HELD}


def test_a_small_bucket_waits_for_nothing() -> None:
    assert [one.turns for one in run([[4096, 512], [4096 // SMALL], [4096 // SMALL]])] == [[], [2], []]
