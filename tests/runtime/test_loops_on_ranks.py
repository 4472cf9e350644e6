"""What loops do beside calling the model gives one process' numbers on real ranks: see `loop_cases`."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch

KINDS = (
    "buffers_bound_anew",
    "hooks_of_the_model",
    "numbers_of_parameters",
    "penalty_in_the_loop",
    "weights_of_a_plain_model",
    "dataclass_returned",
    "step_before_backward",
)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("loop_cases.py", 2)


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(kind: str, preset: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank[f"{kind}-{preset}"]
        assert "error" not in found, found["traceback"]
        assert found["value"] < 1e-10
