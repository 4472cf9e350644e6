"""The predicted peak matches steps on real ranks, also for tiny models, where one bucket holds many blocks."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from launch import launch, selected
from peak_cases import CASES, MUON
from thinned import every

UNDER, OVER = 0.005, 0.05  # fractions by which a step may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Any]]]:
    found = {size: [case for case in selected(request) if case in CASES[size]] for size in CASES}
    return {
        size: launch("peak_cases.py", size, cases=some, timeout_seconds=600) for size, some in found.items() if some
    }


@pytest.mark.parametrize("case", [*every(3, [*CASES[2]][: -len(MUON)]), *[*CASES[2]][-len(MUON) :], *CASES[4]])
def test_peak(ranks: dict[int, list[dict[str, Any]]], case: str) -> None:
    [size] = [size for size in ranks if case in CASES[size]]
    for rank in ranks[size]:
        check_peak(rank[case], under=UNDER, over=OVER)
