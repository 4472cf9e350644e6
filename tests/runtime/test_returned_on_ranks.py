"""Outputs of planned models behave like those of one process: they can be modified in place and viewed."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values
from loop_cases import PRESETS


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("returned_cases.py", 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_gathered_outputs_are_written_in_place(preset: str, ranks: list[dict[str, Any]]) -> None:
    assert all(value < 1e-12 for value in values(ranks, f"written-{preset}"))


@pytest.mark.parametrize("preset", PRESETS)
def test_outputs_lie_as_in_one_process(preset: str, ranks: list[dict[str, Any]]) -> None:
    for found in values(ranks, f"lying-{preset}"):
        for (stride, contiguous, view), (own_stride, own_contiguous, own_view) in found:
            assert (stride, contiguous) == (own_stride, own_contiguous)
            assert view == (None if own_view is None else pytest.approx(own_view, rel=1e-12))
