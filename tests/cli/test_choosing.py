"""Commands that choose among numbers of micro-batches, and a plan that is judged by another memory than its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run

from autopar.plans import Plan

OWN = ["users_models:with_inputs", "--cluster", "cpu"]
ON_MESH = [*OWN, "--mesh", "2"]
SEVERAL = ["--micro-batches", "4,1,2"]


def test_a_plan_is_judged_by_the_memory_that_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, "--out", "plan.json") == 0
    peak = Plan.load("plan.json").predicted.peak_bytes
    capsys.readouterr()
    for memory, code in ((peak - 1, 3), (peak, 0)):
        assert run("check", *ON_MESH, "--plan", "plan.json", "--memory", f"{memory}B") == code
        assert capsys.readouterr().out.startswith("does not fit: " if code else "fits: ")


def test_several_numbers_of_micro_batches_are_to_choose_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, *SEVERAL, "--out", "plan.json") == 0
    chosen = Plan.load("plan.json")
    assert chosen.micro_batches in (1, 2, 4)
    capsys.readouterr()
    assert run("compare", *ON_MESH, *SEVERAL, "--against", "ddp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["step_seconds"] == chosen.predicted.step_seconds
    assert run("search", *OWN, "--devices", "2", *SEVERAL, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["step_seconds"] > 0
    assert run("check", *ON_MESH, *SEVERAL) == 0
