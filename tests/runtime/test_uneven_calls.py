"""Ranks make different calls: the rank whose call changed reports it, or one that waits in vain for a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import Started, script_started

TOLD = r"the ranks were given inputs of different shapes in one call: rank (\d) has (\d) rows, rank (\d) has (\d)\."


@contextmanager
def two_ranks(*words: str) -> Iterator[list[Started]]:
    worker = Path(__file__).with_name("uneven_worker.py")
    with script_started(worker, *words, folder=worker.parent, ranks=2) as ranks:
        yield ranks


@pytest.mark.slow
def test_the_rank_whose_rows_changed_tells_and_nobody_waits() -> None:
    """Although the process groups' timeout is minutes."""
    with two_ranks("600", "4", "2") as ranks:
        logs = [rank.told() for rank in ranks]
        assert all(rank.process.exitcode == 1 for rank in ranks), logs
    found = re.search(TOLD, logs[1])
    assert found is not None, logs[1]
    assert [int(n) for n in found.groups()] == [1, 2, 0, 4]
    assert "CollectiveError: rank 0 of 2, after 2 calls of optimizer.step()" in logs[0]


def test_rows_that_change_on_both_ranks_are_compared_before_the_call() -> None:
    with two_ranks("600", "3", "2") as ranks:
        logs = [rank.told() for rank in ranks]
    for log in logs:
        found = re.search(TOLD, log)
        assert found is not None and [int(n) for n in found.groups()] == [1, 2, 0, 3], log


@pytest.mark.parametrize("how", [pytest.param("ends", marks=pytest.mark.slow), "stays"])
def test_a_rank_that_makes_no_call_is_named(how: str) -> None:
    """A rank that has ended closes its connections; for one that is alive the other waits until the timeout."""
    with two_ranks("20", "4", how) as ranks:
        log = ranks[0].told()
        assert ranks[0].process.exitcode == 1
    assert "CollectiveError: rank 0 of 2, after 2 calls of optimizer.step()" in log, log
    ended = " and ended" if how == "ends" else ""
    assert f"Rank 1 made only 2 calls of planned models{ended}, and this rank is in its 3rd" in log, log


@pytest.mark.slow  # also tested in tests/errors
def test_a_rank_that_saves_alone_tells_and_nobody_waits() -> None:
    """As under `if rank == 0:`; the other rank goes on to its next step."""
    with two_ranks("600", "saves", "4") as ranks:
        logs = [rank.told() for rank in ranks]
        assert all(rank.process.exitcode == 1 for rank in ranks), logs
    told = "InputError: 1 of 2 ranks called save_checkpoint, and rank 1 went on to its 3rd call of planned models"
    assert told in logs[0], logs[0]
