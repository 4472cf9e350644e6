"""Losses outside of the model: calls without them, and changes that the loop makes to them."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch
from loss_cases import CASES


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("loss_cases.py", 2)


@pytest.mark.parametrize("case", [case for case in CASES[2] if case != "half_a_call"])
def test_losses_and_predictions_are_those_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
        assert rank[case]["value"] < 1e-12


def test_a_part_of_what_a_loss_needs_is_not_enough(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "needs 'weight'" in rank["half_a_call"]["value"], rank["half_a_call"]
