"""The predicted peak matches steps on real ranks where causal attention is split over query positions."""

from __future__ import annotations

from typing import Any

import pytest
from causal_peak_cases import CASES
from check_peak import check_peak
from launch import launch, selected

# Fractions by which a step may exceed the prediction, and be below it: the prediction is that of non-causal attention.
UNDER, OVER = 0.005, 0.21


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Any]]]:
    chosen = {*selected(request)}
    return {
        size: launch("causal_peak_cases.py", size, cases=[*filter(chosen.__contains__, cases)], timeout_seconds=600)
        for size, cases in CASES.items()
        if chosen & cases.keys()
    }


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in CASES.items() for case in cases])
def test_peak(ranks: dict[int, list[dict[str, Any]]], size: int, case: str) -> None:
    for rank in ranks[size]:
        check_peak(rank[case], under=UNDER, over=OVER)
        local = rank[case]["value"]["local"]
        assert local
        assert all(name == "sdpa_causal" and "S2" in layout for name, layout in local)
