"""What a search says that found nothing."""

from __future__ import annotations

import re

import pytest

from autopar.solver.linear.clock import Clock


@pytest.mark.parametrize(
    ("limit", "words"), [(0.0, "found no plan within 7 seconds"), (60.0, r"gave up after .* of 60")]
)
def test_a_search_that_ends_by_itself_does_not_blame_the_time(limit: float, words: str) -> None:
    assert re.search(words, Clock(limit, 7.0).too_short().message)
