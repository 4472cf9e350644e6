"""With bf16 compute the predicted peak also matches steps; bf16 copies that a plan drops are really freed."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from half_peak_cases import CASES
from launch import launch, selected

QUICK = (1, "llama"), (2, "llama, whole")
UNDER, OVER = 0.001, 0.025  # fractions by which a step may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Any]]]:
    wanted: dict[int, list[str]] = {}
    for many, case in selected(request, "at"):
        wanted.setdefault(many, []).append(case)
    return {many: launch("half_peak_cases.py", many, cases=wanted[many], timeout_seconds=600) for many in wanted}


@pytest.mark.parametrize(
    "at",
    [
        pytest.param((ranks, case), id=f"{ranks}, {case}", marks=[] if (ranks, case) in QUICK else pytest.mark.slow)
        for ranks, cases in CASES.items()
        for case in cases
    ],
)
def test_peak(ranks: dict[int, list[dict[str, Any]]], at: tuple[int, str]) -> None:
    for found in ranks[at[0]]:
        check_peak(found[at[1]], under=UNDER, over=OVER)
        assert found[at[1]]["value"]["equal"], "a copy made again is not what was dropped"


def test_copies_are_dropped(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """At some budgets dropping copies is all that is needed."""
    for found in ranks.values():
        assert any(case["value"]["again"] for case in found[0].values())
