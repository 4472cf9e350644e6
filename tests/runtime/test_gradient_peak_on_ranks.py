"""Peaks of steps on ranks where readers convert what they read, and so its gradient: as predicted."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from gradient_peak_cases import CASES
from launch import launch, selected

UNDER, OVER = 0.007, 0.03  # what a step may need beyond the prediction, and the prediction beyond a step


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("gradient_peak_cases.py", 2, cases=selected(request), timeout_seconds=600)


MORE = ("bert", "llama, tp", "phi, replays gather")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in MORE else ()) for c in CASES[2]])
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
