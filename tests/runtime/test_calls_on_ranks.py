"""Calls of another kind than the traced one give one process' numbers on real ranks: see `call_cases`."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch

KINDS = (
    "local_inputs",
    "unfrozen_later",
    "gradient_of_the_input",
    "inference_mode",
    "evaluation_needs_no_training_memory",
    "copied_and_called_otherwise",
)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("call_cases.py", 2)


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(kind: str, preset: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank[f"{kind}-{preset}"]
        assert "error" not in found, found["traceback"]
        assert found["value"] < 1e-12


def test_a_planned_model_is_not_planned_again(two: list[dict[str, Any]]) -> None:
    assert all("runs a plan already" in rank["planned_twice"]["value"] for rank in two)
