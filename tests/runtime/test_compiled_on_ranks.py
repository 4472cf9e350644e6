"""`torch.compile(model, fullgraph=True)` of planned models: no graph breaks, and the results of eager mode."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from compile_cases import MODELS, PRESETS
from launch import launch

QUICK = "llama-tp-aot_eager", "mixtral-fsdp-aot_eager"
ALL = {
    (ranks, backend): [f"{name}-{preset}-{backend}" for name in MODELS for preset in PRESETS[ranks]]
    for ranks in PRESETS
    for backend in ("aot_eager", "inductor")
}


def check(found: dict[str, Any], tolerance: float) -> None:
    assert "error" not in found, found["traceback"]
    value = found["value"]
    assert value["graphs"] == 2  # one for the first call, which looks up its plan, and one for all others
    assert value["losses"] <= tolerance
    assert value["parameters"] <= tolerance


def test_compiled_is_eager() -> None:
    cases = [*QUICK, "tokens_are_sent", "weights_written_first"]
    for rank in launch("compile_cases.py", 2, cases=cases, timeout_seconds=800):
        for case in QUICK:
            check(rank[case], tolerance=1e-6)
        assert "error" not in rank["weights_written_first"], rank["weights_written_first"]["traceback"]
        assert rank["weights_written_first"]["value"] < 1e-12
        sent = rank["tokens_are_sent"]
        assert "error" not in sent, sent["traceback"]
        assert sent["value"]["sent"] == 1
        assert sent["value"]["graphs"] > 1
        assert max(sent["value"]["losses"], sent["value"]["gradients"]) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_architectures_compile_in_one_graph() -> None:
    for rank in launch("compile_cases.py", 2, cases=["architectures"], timeout_seconds=1400):
        assert "error" not in rank["architectures"], rank["architectures"]["traceback"]
        found = rank["architectures"]["value"]
        assert len(found) > 40
        assert max(found.values()) < 1e-5, found


@pytest.mark.slow
def test_models_that_lie_otherwise_and_under_a_default_device_compile_in_one_process() -> None:
    cases = "models_in_one_process", "default_device"
    for rank in launch("compile_cases.py", 2, cases=cases, timeout_seconds=800):
        for case in cases:
            assert "error" not in rank[case], rank[case]["traceback"]
            assert rank[case]["value"] < 1e-12


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ here, and there is no compiler")
def test_compiled_norms_have_the_gradients_of_one_process() -> None:
    for rank in launch("compile_cases.py", 2, cases=["gradients_of_norms"], timeout_seconds=800):
        assert "error" not in rank["gradients_of_norms"], rank["gradients_of_norms"]["traceback"]
        assert rank["gradients_of_norms"]["value"] < 1e-12


@pytest.mark.slow
def test_a_kind_of_call_that_was_not_planned_is_told() -> None:
    for rank in launch("compile_cases.py", 2, cases=["another_kind_of_call"], timeout_seconds=800):
        found = rank["another_kind_of_call"]
        assert "error" not in found, found["traceback"]
        assert "make one such call of the model before compiling it" in found["value"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_plan_compiled_is_eager(ranks: int, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles C++ here, and there is no compiler")
    cases = ALL[ranks, backend] + (["dropout"] if (ranks, backend) == (2, "aot_eager") else [])
    found = launch("compile_cases.py", ranks, cases=cases, timeout_seconds=2900)
    for rank in found:
        for case in cases:
            check(rank[case], tolerance=1e-6 if backend == "aot_eager" else 1e-4)
