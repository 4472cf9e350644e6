"""The error message of a search that found nothing, and how CPU seconds are converted to wall-clock time."""

from __future__ import annotations

import re

import pytest

from autopar.solver.linear import clock
from autopar.solver.linear.clock import Clock, Pace


@pytest.mark.parametrize(
    ("limit", "words"), [(0.0, "found no plan within 7 seconds"), (60.0, r"gave up after .* of 60")]
)
def test_a_search_that_ends_by_itself_does_not_blame_the_time(limit: float, words: str) -> None:
    assert re.search(words, Clock(limit, 7.0).too_short().message)


def test_a_busy_machine_gets_more_time_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    assert pace.by_the_clock(3.0) == 3.0
    cpu, gone = iter([0.0, 2.0, 2.0, 2.001, 3.0, 5.0]), iter([0.0, 14.0, 14.0, 99.0, 100.0, 101.0])
    monkeypatch.setattr(clock, "cpu_seconds", lambda: next(cpu))
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(gone))
    with pace.watched():
        pass
    assert pace.by_the_clock(3.0) == 21.0
    with pace.watched():  # too short to estimate the ratio
        pass
    assert pace.by_the_clock(3.0) == 21.0
    with pace.watched():  # more CPU seconds than wall-clock seconds: CPU time has the coarser resolution
        pass
    assert pace.by_the_clock(3.0) == 3.0
