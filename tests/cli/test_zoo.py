"""Models by name: their configs have the sizes in their names, and one table plans them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run

from autopar.sources import load_source
from autopar.zoo import ZOO


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "llama-2-70b" else []) for name in ZOO]
)
def test_a_model_has_the_parameters_that_are_told(name: str) -> None:
    source = load_source(name, batch=1, sequence=None if name.startswith("vit") else 32)
    assert sum(parameter.numel() for parameter in source.model.parameters()) == ZOO[name].parameters


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("zoo") == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:]] == list(ZOO)
    assert run("zoo", "gpt2", "t5-small", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["config"]["n_layer"]) for model in listed[:1]] == [("gpt2", 12)]
    assert listed[1]["architecture"] == "T5ForConditionalGeneration"


def test_each_is_planned_as_by_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mesh", "2", "--batch", "4", "--seq", "32"]
    assert run("zoo", "bert-base", "gpt2", *words, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in figures] == ["bert-base", "gpt2"]
    assert run("plan", "gpt2", *words, "--out", "plan.json") == 0
    capsys.readouterr()
    assert run("explain", "plan.json", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert figures[1]["step_seconds"] == alone["step_seconds"] and figures[1]["peak_bytes"] == alone["peak_bytes"]


def test_one_that_does_not_fit_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("zoo", "gpt2", "--mesh", "2", "--batch", "4", "--seq", "32", "--memory", "100MiB") == 0
    row, note = capsys.readouterr().out.splitlines()[1:3]
    assert row.startswith("gpt2 ") and " needs " in row
    assert note.startswith("gpt2: no plan fits")
