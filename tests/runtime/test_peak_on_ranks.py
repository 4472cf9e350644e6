"""The predicted peak is that of steps on real ranks, for tiny models too, where one bucket holds many blocks."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from launch import launch, selected
from peak_cases import CASES
from thinned import every

UNDER, OVER = 0.005, 0.05  # what a step may need beyond the prediction, and the prediction beyond a step


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("peak_cases.py", 2, cases=selected(request), timeout_seconds=600)


@pytest.mark.parametrize("case", every(3, CASES[2]))
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
