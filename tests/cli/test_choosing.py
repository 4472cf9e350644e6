"""Commands that choose a number of micro-batches, and plans checked against another memory size than their own."""

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


def test_a_damaged_plan_does_not_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, "--out", "plan.json") == 0
    data = json.loads(Path("plan.json").read_text())
    number = next(i for i, node in enumerate(data["nodes"]) if node["inputs"])
    for name, part in (("inputs", "input"), ("outputs", "result")):
        one = data["nodes"][number]
        damaged = {**one, name: ["S9", *one[name][1:]]}
        nodes = [damaged if i == number else node for i, node in enumerate(data["nodes"])]
        Path("damaged.json").write_text(json.dumps({**data, "nodes": nodes}))
        capsys.readouterr()
        assert run("check", *ON_MESH, "--plan", "damaged.json") == 2
        told = capsys.readouterr().err
        assert f"{part} 0 of node '{one['name']}', of shape " in told and "cannot have layout S9" in told


def test_several_numbers_of_micro_batches_are_to_choose_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, *SEVERAL, "--out", "plan.json") == 0
    chosen = Plan.load("plan.json")
    assert chosen.micro_batches in (1, 2, 4)
    capsys.readouterr()
    assert run("compare", *ON_MESH, *SEVERAL, "--against", "ddp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["step_seconds"] == chosen.predicted.step_seconds
    assert run("search", *OWN, "--devices", "2", *SEVERAL, "--json") == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["step_seconds"], found["micro_batches"]) == (chosen.predicted.step_seconds, chosen.micro_batches)
    assert run("search", *OWN, "--devices", "2", *SEVERAL) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "micro-batches"
    assert row.split()[-1] == str(chosen.micro_batches)
    assert run("search", *OWN, "--devices", "2") == 0
    assert "micro-batches" not in capsys.readouterr().out  # without a choice there is no column
    assert run("check", *ON_MESH, *SEVERAL) == 0


def test_the_solver_may_be_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for solver in ("highs", "cbc"):
        assert run("plan", *ON_MESH, "--solver", solver, "--out", "plan.json") == 0
        assert Plan.load("plan.json").certificate.solver == solver
    capsys.readouterr()
    assert run("plan", *ON_MESH, "--solver", "glpk") == 2
    assert "solver is 'glpk': it must be one of highs, cbc" in capsys.readouterr().err


def test_a_model_keeps_its_dtypes_on_cpu_as_the_help_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And has those that are requested."""
    words = ["plan", "users_models:in_double", *ON_MESH[1:], "--out", "plan.json"]
    for asked, dtype in (([], "float64"), (["--precision", "fp32"], "float32")):
        assert run(*words, *asked) == 0
        assert {parameter.dtype for parameter in Plan.load("plan.json").parameters} == {dtype}
    capsys.readouterr()
    assert run("plan", "--help") == 0
    assert "the model's own on CPU" in " ".join(capsys.readouterr().out.replace("│", " ").split())
