"""`torch.compile(model, fullgraph=True)` of planned models: one graph, and the numbers of eager mode."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from compile_cases import MODELS, PRESETS
from launch import launch

QUICK = [f"{name}-{preset}-aot_eager" for name in MODELS for preset in PRESETS[2]]
SLOW = {ranks: [f"{n}-{p}-inductor" for n in MODELS for p in PRESETS[ranks]] for ranks in PRESETS}
ON_FOUR = [f"{name}-{preset}-aot_eager" for name in MODELS for preset in PRESETS[4]]


def check(found: dict[str, Any], tolerance: float) -> None:
    assert "error" not in found, found["traceback"]
    value = found["value"]
    assert value["graphs"] == 1
    assert value["losses"] <= tolerance
    assert value["parameters"] <= tolerance


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    names = [*QUICK, "dropout", "another_kind_of_call"]
    return launch("compile_cases.py", 2, environment={"CASES": ",".join(names)})


@pytest.mark.parametrize("case", [*QUICK, "dropout"])
def test_compiled_is_eager(case: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        check(rank[case], tolerance=1e-6)


def test_a_kind_of_call_that_was_not_planned_is_told(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "make one such call of the model before compiling it" in rank["another_kind_of_call"]["value"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
@pytest.mark.parametrize("ranks", [2, 4])
def test_inductor_is_eager(ranks: int) -> None:
    found = launch("compile_cases.py", ranks, environment={"CASES": ",".join(SLOW[ranks])}, timeout_seconds=2900)
    for rank in found:
        for case in SLOW[ranks]:
            check(rank[case], tolerance=1e-4)  # AdamW's first steps make much of small gradients


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_is_eager_on_two_axes() -> None:
    for rank in launch("compile_cases.py", 4, environment={"CASES": ",".join(ON_FOUR)}, timeout_seconds=850):
        for case in ON_FOUR:
            check(rank[case], tolerance=1e-6)
