"""Models whose dims no number of ranks divides train as in one process: all ranks begin the same collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from launch import launch, selected
from ragged_cases import CASES


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, Any]]]:
    """The results of a number of ranks for the cases that are to run."""
    return functools.cache(lambda ranks: launch("ragged_cases.py", ranks, cases=selected(request, "scheme")))


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        pytest.param(ranks, scheme, marks=pytest.mark.slow if ranks == 4 or "recompute" in scheme else ())
        for ranks, some in CASES.items()
        for scheme in some
    ],
)
def test_equals_one_process(ranks: int, scheme: str, found: Callable[[int], list[dict[str, Any]]]) -> None:
    for rank in found(ranks):
        assert "error" not in rank[scheme], rank[scheme]["traceback"]
        assert rank[scheme]["value"] < 1e-12
