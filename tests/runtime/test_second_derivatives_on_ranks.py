"""Second derivatives equal those of one process, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values
from loop_cases import PRESETS
from second_derivative_models import BY_FORWARD, BY_THE_LOOP


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("second_derivative_cases.py", 2)


@pytest.mark.parametrize("way", [*(f"{preset}-global" for preset in PRESETS), "ddp-local", "fsdp-local"])
@pytest.mark.parametrize("name", [*BY_THE_LOOP, *BY_FORWARD])
def test_gradients_of_gradients_are_those_of_one_process(name: str, way: str, ranks: list[dict[str, Any]]) -> None:
    """Gradient penalties, Hessian-vector products and meta-learning; forces and differential equations in forward."""
    assert all(worst < 1e-11 for worst in values(ranks, f"{name}-{way}"))


@pytest.mark.parametrize("preset", PRESETS)
def test_forces_train_and_are_evaluated(preset: str, ranks: list[dict[str, Any]]) -> None:
    assert all(worst < 1e-11 for worst in values(ranks, f"molecules-{preset}"))


@pytest.mark.parametrize("case", ["recomputed", "with_micro_batches"])
def test_in_steps_of_every_kind(case: str, ranks: list[dict[str, Any]]) -> None:
    assert all(worst < 1e-11 for worst in values(ranks, case))


def test_what_has_no_second_derivative_in_parts_is_refused(ranks: list[dict[str, Any]]) -> None:
    for of_norm, of_some, of_classes in values(ranks, "refused"):
        for told, subject in (
            (of_norm, "batch normalisation"),
            (of_some, "batch normalisation"),
            (of_classes, "log_soft"),
        ):
            assert told.startswith(f"InputError: the gradient of {subject}")
            assert "cannot be differentiated again" in told
