"""The predicted peak of a call without gradients matches calls on real ranks, including gathered parameters."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from forward_peak_cases import CASES
from launch import launch, selected
from thinned import every

UNDER, OVER = 0.001, 0.01  # fractions by which a call may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("forward_peak_cases.py", 2, cases=selected(request))


@pytest.mark.parametrize("case", every(5, CASES[2]))
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
