"""`autopar simulate`: its figures and files, and the plans that it accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import refused, run

ON_MESH = ["users_models:with_inputs", "--cluster", "cpu", "--mesh", "2"]


def test_simulate_says_what_its_figures_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", *ON_MESH) == 0
    *rows, legend = capsys.readouterr().out.split("(", 1)
    for name in ("step", "predicted step", "compute", "exposed", "busy"):
        assert name in rows[0] and f"{name}:" in legend


def test_simulate_writes_a_trace_and_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--trace", "step.trace.json", "--picture", "step.png"]
    assert run("simulate", *ON_MESH, *outputs, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["step_seconds"] >= figures["compute_busy_seconds"] >= figures["compute_seconds"] > 0
    assert json.loads((folder / "step.trace.json").read_text())["traceEvents"]
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_takes_a_plan_of_its_model_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, "--out", "plan.json") == 0
    capsys.readouterr()
    assert run("simulate", *ON_MESH, "--plan", "plan.json") == 0
    assert "exposed" in capsys.readouterr().out
    refused(capsys, ["simulate", "users_models:wider", *ON_MESH[1:], "--plan", "plan.json"], "another model")


@pytest.mark.parametrize("command", ["check", "simulate"])
def test_how_a_model_trains_is_read_from_its_plan(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["gpt2", "--mesh", "2", "--batch", "4", "--seq", "16"]
    trained = ["--cluster", "v100", "--precision", "fp16", "--micro-batches", "2", "--optimizer", "sgd"]
    trained += ["--constraint", "fsdp", "--memory", "8GiB"]
    assert run("plan", *model, *trained, "--axis-names", "dp", "--out", "plan.json") == 0
    assert run(command, *model, "--plan", "plan.json") == 0
    assert run(command, *model, *trained, "--plan", "plan.json") == 0
    capsys.readouterr()
    for option, other in {
        "--cluster": "a100",
        "--precision": "fp32",
        "--micro-batches": "4",
        "--optimizer": "sgd-momentum",
        "--constraint": "ddp",
    }.items():
        words = [command, *model, option, other, "--plan", "plan.json"]
        refused(capsys, words, f"{option} differs from what the plan was made for")


def test_simulate_makes_nothing_of_another_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, "--out", "plan.json") == 0
    capsys.readouterr()
    refused(capsys, ["simulate", *ON_MESH, "--plan", "plan.json", "--memory", "1GiB"], "--memory differs from")
