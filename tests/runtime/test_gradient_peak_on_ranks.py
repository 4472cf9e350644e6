"""The predicted peak matches steps on ranks where ops convert their inputs, and hence the inputs' gradients."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from gradient_peak_cases import CASES
from launch import launch, selected

UNDER, OVER = 0.007, 0.03  # fractions by which a step may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("gradient_peak_cases.py", 2, cases=selected(request), timeout_seconds=600)


MORE = ("bert", "llama, tp", "phi, replays gather")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in MORE else ()) for c in CASES[2]])
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
