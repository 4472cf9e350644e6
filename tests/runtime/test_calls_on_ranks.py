"""Calls unlike the traced one, and what loops do beside calling, are as in one process: `call_cases`, `loop_cases`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from launch import launch

CALLS, LOOPS = "call_cases.py", "loop_cases.py"
KINDS = {
    CALLS: (
        "local_inputs",
        "unfrozen_later",
        "gradient_of_the_input",
        "inference_mode",
        "evaluation_needs_no_training_memory",
        "copied_and_called_otherwise",
    ),
    LOOPS: (
        "buffers_bound_anew",
        "hooks_of_the_model",
        "numbers_of_parameters",
        "penalty_in_the_loop",
        "weights_of_a_plain_model",
        "dataclass_returned",
        "layers_under_vmap",
        "counts_of_kinds",
        "weights_written_first",
        "adafactor",
        "step_before_backward",
    ),
}
Two = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two() -> Two:
    """What two ranks found of a file of cases."""
    return functools.cache(lambda cases: launch(cases, 2))


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp"])
@pytest.mark.parametrize(("cases", "kind"), [(cases, kind) for cases, kinds in KINDS.items() for kind in kinds])
def test_equals_one_process(cases: str, kind: str, preset: str, two: Two) -> None:
    for rank in two(cases):
        found = rank[f"{kind}-{preset}"]
        assert "error" not in found, found["traceback"]
        assert found["value"] < 1e-12


def test_a_planned_model_is_not_planned_again(two: Two) -> None:
    assert all("runs a plan already" in rank["planned_twice"]["value"] for rank in two(CALLS))
