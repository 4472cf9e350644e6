"""Gradients of parameters that the reducing pass does not reach are reduced with the others."""

from __future__ import annotations

from typing import Any

import pytest
from late_cases import CASES, DROPS, PRESETS, STEPS
from launch import launch, values


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("late_cases.py", 2)


@pytest.mark.parametrize("case", [case for case in CASES[2] if case.startswith(("aa", "ab"))])
def test_tasks_in_turn_train_as_in_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
        assert rank[case]["value"] < 1e-12


@pytest.mark.parametrize("case", [case for case in CASES[2] if case.startswith("asked")])
def test_gradients_asked_for_are_of_one_loss_and_leave_those_that_wait(ranks: list[dict[str, Any]], case: str) -> None:
    assert max(values(ranks, case)) < 1e-12


@pytest.mark.parametrize("preset", PRESETS)
def test_hooks_do_not_run_for_gradients_of_earlier_passes(ranks: list[dict[str, Any]], preset: str) -> None:
    waits = preset != "tp"  # under tp the bias' gradients come in each pass
    for alone, penalised in values(ranks, f"kept, {preset}"):
        assert alone == [number for number in range(6) for _ in range(2) if number % 2 or not waits]
        assert penalised == [number for number in range(6) for _ in range(2)]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_zeroes_gradients_drops_those_that_wait(ranks: list[dict[str, Any]], preset: str) -> None:
    for found in values(ranks, f"dropped, {preset}"):
        assert found.keys() == DROPS.keys()
        assert {way: error for way, error in found.items() if error > 1e-12} == {}


def test_a_gradient_that_lacks_those_that_wait_is_not_replaced(ranks: list[dict[str, Any]]) -> None:
    for told in values(ranks, "set meanwhile"):
        assert all("is set while gradients of micro-batches wait" in one for one in told)


@pytest.mark.parametrize("case", [case for case in CASES[2] if case.startswith("hooks")])
def test_hooks_run_when_gradients_come(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
        found = rank[case]["value"]
        assert found["error"] < 1e-12
        if "tp" not in case:  # elsewhere the accumulated gradients come at once, in the last pass
            assert found["gradient"] == 2 * STEPS and found["behind"] == STEPS
