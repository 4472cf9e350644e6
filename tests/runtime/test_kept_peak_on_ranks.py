"""Peaks of steps on ranks where ops keep more than what they read and make: as predicted."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from dtensor_support import TAKES_GRADIENTS
from kept_peak_cases import CASES
from launch import launch, selected

UNDER, OVER = 0.01, 0.06  # what a step may need beyond the prediction, and the prediction beyond a step


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("kept_peak_cases.py", 2, cases=selected(request), timeout_seconds=600)


@pytest.mark.parametrize("case", CASES[2])
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    if case == "stored in shards, computed whole" and not TAKES_GRADIENTS:
        pytest.skip("torch 2.11 copies gradients of DTensors, each of which is there twice for a moment")
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
