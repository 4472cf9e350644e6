"""Loss scaling skips a step on all ranks or on none; gradients are reduced in the dtype that the user requests."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values
from precision_cases import DTYPES, OVERFLOWS, PRESETS, SPOILT


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("precision_cases.py", 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_scaler_does_what_it_does_in_one_process(preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"scaler-{preset}"):
        assert found["skipped"] == found["expected"]["skipped"] == [OVERFLOWS, SPOILT]
        assert found["scales"] == found["expected"]["scales"]
        assert found["error"] < 2e-3  # precision of float16


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_summed_in_the_given_dtype(dtype: str, preset: str, two: list[dict[str, Any]]) -> None:
    name = str(DTYPES[dtype]).removeprefix("torch.")
    assert values(two, f"{dtype}-{preset}") == [[name], [name]]


@pytest.mark.parametrize("preset", PRESETS)
def test_autocast_of_the_model(preset: str, two: list[dict[str, Any]]) -> None:
    assert max(values(two, f"autocast-{preset}")) < 2e-2  # precision of bfloat16


@pytest.mark.parametrize("preset", PRESETS)
def test_norms_with_running_statistics_run_in_half_precision(preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"norms-{preset}"):
        assert len(found) == 13
        assert max(found) < 0.05
