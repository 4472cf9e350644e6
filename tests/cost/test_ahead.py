"""Which gathers begin ahead of use: each in time, and none much too early, whatever the sizes of the buckets."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.buckets.ahead import due_ahead


class Read(NamedTuple):
    name: str
    gathers: int
    read_bytes: int


def ahead(buckets: list[Read], at: int) -> dict[str, int]:
    """How many collectives of each later bucket have begun once the bucket at index `at` is read."""
    longest = max(one.gathers for one in buckets)
    return {one.name: number for one, number in due_ahead(buckets[at], buckets[at + 1 :], longest, read=True)}


def test_of_equal_buckets_the_next_is_on_its_way_and_all_but_the_last_collective_of_the_one_behind_it() -> None:
    assert ahead([Read(name, 1, 100) for name in "abcd"], 0) == {"b": 1}
    assert ahead([Read(name, 2, 100) for name in "abcd"], 0) == {"b": 2, "c": 1}
    assert ahead([Read(name, 3, 100) for name in "abcdef"], 0) == {"b": 3, "c": 2, "d": 1, "e": 1}


def test_what_is_read_with_little_hides_nothing() -> None:
    """A bucket that little compute reads hides nothing. Blocks of a large bucket with two collectives and a small one
    with one: each large bucket's gathers get the compute time of a whole block."""
    block = [Read("weights", 2, 2300), Read("projection", 1, 210)]
    next_ones = [one._replace(name=f"next {one.name}") for one in block]
    third = [one._replace(name=f"third {one.name}") for one in block]
    found = ahead([*block, *next_ones, *third], 0)
    assert found == {"projection": 1, "next weights": 2, "third weights": 1}


def test_at_the_start_of_a_pass_the_first_one_goes_before() -> None:
    buckets = [Read(name, 2, 100) for name in "abc"]
    assert [(one.name, n) for one, n in due_ahead(buckets[0], buckets[1:], 2, read=False)] == [("b", 1)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4096)), min_size=1, max_size=30))
def test_all_of_the_next_is_on_its_way_and_nothing_much_too_early(drawn: list[tuple[int, int]]) -> None:
    buckets = [Read(str(i), *one) for i, one in enumerate(drawn)]
    begun: dict[str, int] = {}
    for at, one in enumerate(buckets):
        assert begun.get(one.name, 0) == (one.gathers if at else 0)
        now = ahead(buckets, at)
        assert all(1 <= number <= buckets[int(name)].gathers for name, number in now.items())
        before, last = 0, one.read_bytes
        for other in buckets[at + 1 :]:
            if now.get(other.name) == other.gathers:
                assert before < max(1, last, other.read_bytes)  # at most one bucket of its size is read before it
            before, last = before + other.read_bytes, other.read_bytes
        begun |= {name: max(number, begun.get(name, 0)) for name, number in now.items()}


def test_a_small_one_has_the_time_of_the_one_before_it() -> None:
    buckets = [Read("a", 2, 1000), Read("b", 2, 1000), Read("norms", 2, 8), Read("c", 2, 1000)]
    assert ahead(buckets, 0) == {"b": 2, "norms": 1, "c": 1}
    assert ahead(buckets, 1) == {"norms": 2, "c": 2}


def test_small_ones_do_not_hide_the_large_one_behind_them() -> None:
    """Blocks of norms, weights with two collectives, and biases: the next block's weights get the time of a block."""
    block = [Read("norms", 1, 20), Read("weights", 2, 60_000), Read("biases", 2, 30)]
    buckets = [one._replace(name=f"{one.name} {i}") for i in range(4) for one in block]
    found = ahead(buckets, 1)
    assert found["weights 1"] == 2
    assert found["weights 2"] == 1
    assert "weights 3" not in found


def test_many_small_ones_do_not_add_up() -> None:
    assert "large" not in ahead([*(Read(str(i), 1, 10) for i in range(6)), Read("large", 1, 10_000)], 0)
