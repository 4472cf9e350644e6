"""Weights that no call reads, on two ranks: the predicted bytes are those held."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch
from unread_cases import CASES


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    return launch("unread_cases.py", 2)


@pytest.mark.parametrize("case", CASES[2])
def test_predicted_is_held(case: str, report: list[dict[str, Any]]) -> None:
    for rank in report:
        assert "error" not in rank[case], rank[case]["traceback"]
        found = rank[case]["value"]
        assert found["held"] == found["predicted_held"]
        assert found["with_state"] == 4  # the four that are read
        if case == "ddp":  # nothing is in flight; otherwise, for so small a model, that is as much as the weights
            assert found["peak"] == pytest.approx(found["predicted_peak"], rel=1e-4), found
