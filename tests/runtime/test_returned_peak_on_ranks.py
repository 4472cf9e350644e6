"""The predicted peak matches steps on real ranks where the caller holds more results than a loss."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from launch import launch, selected
from returned_peak_cases import CASES, WIDE
from thinned import every

UNDER, OVER = 0.005, 0.05  # fractions by which a step may exceed the prediction, and be below it
GATHERED = "probabilities, tp"  # the peak is where logits are gathered, before probabilities exist
ALWAYS = GATHERED, *WIDE


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("returned_peak_cases.py", 2, cases=selected(request), timeout_seconds=600)


@pytest.mark.parametrize("case", [*ALWAYS, *every(5, (case for case in CASES[2] if case not in ALWAYS))])
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
