"""The predicted peak matches steps on real ranks where the loss is split over its classes."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from class_peak_cases import CASES, CLASSES, ROWS
from launch import launch, selected

UNDER, OVER = 0.005, 0.02  # fractions by which a step may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("class_peak_cases.py", 2, cases=selected(request), timeout_seconds=600)


@pytest.mark.parametrize("case", CASES[2])
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
        assert rank[case]["value"]["split"][0] == "S1"


@pytest.mark.parametrize("case", ["plain, tp", "smoothed, tp", "plain, free"])
def test_backward_makes_one_tensor_beside_the_one_that_is_kept(ranks: list[dict[str, Any]], case: str) -> None:
    local_logits = 4 * ROWS * CLASSES // 2
    for rank in ranks:
        assert rank[case]["value"]["measured"][0] < 2.2 * local_logits
