"""Every command: its output, its JSON, its exit code, and its errors on bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import put_users_files, refused, run, with_option

from autopar.cli.app import EXAMPLES, app
from autopar.plans import Plan

OWN = ["users_models:with_inputs", "--cluster", "cpu"]
ON_MESH = [*OWN, "--mesh", "2"]
EVERY = ["plan", "explain", "compare", "report", "search", "check", "simulate", "profile", "zoo"]


@pytest.fixture(scope="module")
def planned() -> str:
    """A plan of the user's model, as JSON."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as here:
        put_users_files(Path(here), patch)
        assert run("plan", *ON_MESH, "--out", "plan.json") == 0
        return Path("plan.json").read_text()


@pytest.fixture
def plan_file(planned: str, folder: Path) -> str:
    """The path of that plan, in the current folder."""
    (folder / "plan.json").write_text(planned)
    return "plan.json"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain"], "Missing argument"),
        (["explain", "missing.json"], "no plan can be read from missing.json"),
        (["explain", "."], "no plan can be read from ."),
        (["explain", "config.json"], "config.json is not a plan: a plan has a version"),
        (["explain", "users_models.py"], "is not a plan"),
        (["explain", "empty.json"], "is not a plan"),
        (["explain", "old.json"], "plan version 0"),
        (["explain", "damaged.json"], "damaged plan"),
        (["explain", "list.json"], "list.json is not a plan"),
        (["explain", "text.json"], "memory_budget_bytes holds '8GiB'"),
        (["explain", "picture.png"], "no plan can be read from picture.png"),
        (["explain", "report.html"], "is a report"),
        (["explain", "plan.json", "--colour"], "--colour"),
        (["report"], "Missing argument"),
        (["report", "missing.json"], "no plan can be read"),
        (["report", "config.json"], "config.json is not a plan"),
        (["report", "users_models.py"], "is not a plan"),
        (["report", "old.json"], "plan version 0"),
        (["report", "damaged.json"], "damaged plan"),
        (["report", "picture.png"], "no plan can be read"),
        (["report", "report.html"], "is a report"),
        (["report", "plan.json", "-o", "nowhere/report.html"], "no folder nowhere"),
        (["report", "plan.json", "-o", "."], "is a folder"),
        (["compare", "users_models:alon", *ON_MESH[1:]], "did you mean alone?"),
        (["compare", *OWN], "Missing option '--mesh'"),
        (["compare", *with_option("--mesh", "2*2", ON_MESH)], "is no mesh"),
        (["compare", *with_option("--memory", "70", ON_MESH)], "no unit"),
        (
            ["compare", *with_option("--memory", "1KiB", ON_MESH)],
            "the smallest budget that the planner finds one for is",
        ),
        (["compare", *with_option("--tradeoff", "1", ON_MESH)], "2 or more"),
        (["compare", *with_option("--against", "zero9", ON_MESH)], "'zero9' is no preset"),
        (["compare", *with_option("--cluster", "z80", ON_MESH)], "'z80' is unknown"),
        (["compare", *with_option("--constraint", "param:* = ", ON_MESH)], "param:*"),
        (["compare", *with_option("--config", "config.json", ON_MESH)], "--config goes with hf:"),
        (
            ["plan", *with_option("--config", "config.json", ["gpt2", "--mesh", "2"])],
            "write hf:GPT2LMHeadModel with yours",
        ),
        (["compare", *with_option("--precision", "int8", ON_MESH)], "'int8' is unknown"),
        (["compare", *with_option("--out", "nowhere/plan.json", ON_MESH)], "no folder nowhere"),
        (["search", *OWN], "Missing option '--devices'"),
        (["search", *OWN, "--devices", "2", "--micro-batches", "1;2"], "--micro-batches '1;2'"),
        (["search", *OWN, "--devices", "2", "--micro-batches", "3,1"], "which does not divide the 4 rows"),
        (["search", *OWN, "--devices", "2", "--constraint", "hsdp"], "hsdp"),
        (["search", *OWN, "--devices", "0"], "--devices"),
        (["search", *OWN, "--devices", "many"], "--devices"),
        (["search", *OWN, "--devices", "2", "--most-axes", "9"], "--most-axes"),
        (["search", *OWN, "--devices", "2", "--mesh", "2"], "--mesh"),
        (["search", *OWN, "--devices", "2", "--memory", "1KiB"], "no plan fits on any mesh of 2 devices"),
        (["search", *OWN, "--devices", "2", "--memory", "lots"], "no amount of memory"),
        (["search", *with_option("--cluster", "config.json", OWN), "--devices", "2"], "measured on one mesh"),
        (["search", *with_option("--cluster", "z80", OWN), "--devices", "2"], "'z80' is unknown"),
        (["search", "nowhere_to_be_found:f", "--devices", "2"], "no module"),
        (["search", *OWN, "--devices", "2", "--out", "nowhere/p.json"], "no folder nowhere"),
        (["check", *OWN], "--mesh is missing: write the devices along each axis, like 8 or 4x8; or name a --plan"),
        (["check", "users_models", *ON_MESH[1:]], "is not a model"),
        (["check", "users_models:text", *ON_MESH[1:]], "must return a torch.nn.Module"),
        (["check", *with_option("--memory", "70GiG", ON_MESH)], "unit 'GiG'"),
        (["check", *with_option("--mesh", "2x0", ON_MESH)], "mesh shape"),
        (["check", *ON_MESH, "--plan", "missing.json"], "no plan can be read"),
        (["check", *ON_MESH, "--plan", "damaged.json"], "damaged plan"),
        (["check", *with_option("--mesh", "4", ON_MESH), "--plan", "plan.json"], "for a mesh of 2, not of 4"),
        (["check", "users_models:wider", *ON_MESH[1:], "--plan", "plan.json"], "for another model"),
        (["check", "users_models:longer", *ON_MESH[1:], "--plan", "plan.json"], "for another graph"),
        (["check", "users_models:broken", *ON_MESH[1:]], "ValueError: no such thing"),
        (["profile", "--mesh", "2*2"], "is no mesh"),
        (["profile", "--mesh", "0"], "mesh shape"),
        (["profile", "--mesh", "2x"], "is no mesh"),
        (["profile", "--mesh", "2", "--axis-names", "dp,tp"], "one name an axis"),
        (["profile", "--mesh", "2x2", "--axis-names", "dp,dp"], "repeat"),
        (["profile", "--mesh", "2", "--axis-names", ""], "non-empty"),
        (["profile", "--seconds", "0"], "--seconds"),
        (["profile", "--seconds", "long"], "--seconds"),
        (["profile", "-o", "nowhere/cluster.json"], "no folder nowhere"),
        (["profile", "-o", "."], "is a folder"),
        (["profile", "machine"], "machine"),
        (["simulate", *OWN], "--mesh is missing"),
        (["simulate", "users_models:alon", *ON_MESH[1:]], "did you mean alone?"),
        (["simulate", *with_option("--mesh", "2x", ON_MESH)], "is no mesh"),
        (["simulate", *with_option("--memory", "8", ON_MESH)], "no unit"),
        (
            ["simulate", *with_option("--memory", "1KiB", ON_MESH)],
            "the smallest budget that the planner finds one for is",
        ),
        (["simulate", *ON_MESH, "--picture", "step.bmp"], "its name must end in one of .png, .svg, .pdf"),
        (["simulate", *ON_MESH, "--plan", "missing.json"], "no plan can be read"),
        (["simulate", *ON_MESH, "--plan", "report.html"], "is a report"),
        (["simulate", *with_option("--mesh", "4", ON_MESH), "--plan", "plan.json"], "for a mesh of"),
        (["simulate", "users_models:longer", *ON_MESH[1:], "--plan", "plan.json"], "for another graph"),
        (["simulate", *ON_MESH, "--trace", "nowhere/step.json"], "no folder nowhere"),
        (["simulate", *ON_MESH, "--picture", "."], "is a folder"),
        (["simulate", *with_option("--micro-batches", "1,2", ON_MESH)], "this takes one number"),
        (["simulate", *with_option("--precision", "int8", ON_MESH)], "'int8' is unknown"),
        (["zoo", "gpt9"], "the zoo has no 'gpt9'"),
        (["zoo", "gpt2", "--mesh", "8"], "give --batch"),
        (["zoo", "gpt2", "--mesh", "8x", "--batch", "8"], "is no mesh"),
        (["zoo", "gpt2", "--mesh", "0", "--batch", "8"], "mesh shape"),
        (["zoo", "gpt2", "--mesh", "8", "--batch", "8", "--cluster", "z80"], "'z80' is unknown"),
        (["zoo", "gpt2", "--mesh", "8", "--batch", "8", "--memory", "70"], "no unit"),
        (["zoo", "gpt2", "--mesh", "8", "--batch", "8", "--micro-batches", "3"], "does not divide into 3"),
        (["zoo", "gpt2", "--mesh", "8", "--batch", "8", "--seq", "4096"], "longer than the 1024 learned positions"),
        (["zoo", "gpt2", "--mesh", "8", "--batch", "0"], "--batch"),
        (["zoo", "gpt2", "--mesh", "2", "--axis-names", "dp,tp", "--batch", "8"], "one name an axis"),
        (["zoo", "--colour"], "--colour"),
    ],
)
def test_mistakes(
    plan_file: str, folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (folder / "empty.json").write_text("")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "old.json").write_text('{"version": 0}')
    (folder / "text.json").write_text(
        json.dumps({**json.loads(Path(plan_file).read_text()), "memory_budget_bytes": "8GiB"})
    )
    (folder / "damaged.json").write_text('{"version": 1, "nodes": [{}]}')
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    (folder / "report.html").write_text("<!doctype html>")
    refused(capsys, arguments, words)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_plan_prints_the_plan_as_json(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *ON_MESH, "--json") == 0
    printed = Plan.from_json(capsys.readouterr().out)
    assert replace(printed, planning_seconds={}) == replace(Plan.load(plan_file), planning_seconds={})


def test_explain_prints_figures_as_json(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    figures = _json(capsys, "explain", plan_file)
    assert figures["peak_bytes"] == Plan.load(plan_file).predicted.peak_bytes


def test_compare(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ON_MESH, "--against", "ddp", "--against", "fsdp"]
    assert run("compare", *words, "--out", "compared.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["this", "ddp", "fsdp"]
    figures = _json(capsys, "compare", *words)
    saved = Plan.load("compared.json")
    assert [a["name"] for a in figures["alternatives"]] == [a.name for a in saved.comparison] == ["ddp", "fsdp"]
    assert figures["plan"]["step_seconds"] == Plan.load(plan_file).predicted.step_seconds
    assert _json(capsys, "compare", *words, "--tradeoff", "2")["tradeoff"][1]["recompute_seconds"] == 0
    assert run("explain", "compared.json") == 0
    assert "\n".join(lines) in capsys.readouterr().out


def test_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("search", *OWN, "--devices", "4", "--out", "best.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "recompute" in lines[0].split()
    assert sorted(line.split()[0] for line in lines[1:]) == ["2x2", "4"]
    figures = _json(capsys, "search", *OWN, "--devices", "4")
    assert [f["step_seconds"] for f in figures] == sorted(f["step_seconds"] for f in figures)
    assert list(Plan.load("best.json").mesh_shape) == figures[0]["mesh"]


def test_check_answers_with_its_exit_code(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", *ON_MESH) == 0
    assert capsys.readouterr().out.startswith("fits: ")
    assert run("check", *ON_MESH, "--memory", "1KiB") == 3
    captured = capsys.readouterr()
    assert captured.out.startswith("does not fit: ") and "smallest budget" in captured.out
    assert run("check", *ON_MESH, "--memory", "1KiB", "--json") == 3
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False and 0 < told["budget_lower_bound_bytes"] <= told["smallest_budget_bytes"]
    assert _json(capsys, "check", *ON_MESH)["fits"] is True


def test_report(plan_file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = _json(capsys, "report", plan_file, "-o", "made.html", "--title", "My model")
    text = (folder / "made.html").read_bytes()
    assert written == {"written": "made.html", "bytes": len(text)}
    assert b"<h1>My model</h1>" in text


@pytest.mark.parametrize("words", [ON_MESH, OWN], ids=["on its mesh", "on the plan's"])
def test_check_and_simulate_know_the_plan_of_a_model(
    words: list[str], plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *words, "--plan", plan_file) == 0
    assert capsys.readouterr().out.startswith("fits: ")
    seconds = json.loads(Path(plan_file).read_text())["predicted"]["step_seconds"]
    assert _json(capsys, "simulate", *words, "--plan", plan_file)["predicted_step_seconds"] == seconds


@pytest.mark.parametrize("command", EVERY)
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("command", EVERY)
def test_every_command_has_ten_mistakes_that_it_tells(command: str) -> None:
    (marks,) = [mark for mark in test_mistakes.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    told = [arguments for arguments, _ in marks.args[1] if arguments[0] == command]
    assert command == "plan" or len(told) >= 10  # the mistakes of `plan` are in test_cli.py


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_the_examples_of_the_help_are_commands(example: str) -> None:
    _, name, *words = example.split()
    typer.main.get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]


def test_every_command_stands_here() -> None:
    assert [command.callback.__name__ for command in app.registered_commands if command.callback] == EVERY


def test_the_root_tells_exit_codes_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert "Exit codes: 0 done; 2" in printed and "--install-completion" in printed


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        pytest.param("autopar ", EVERY, id="commands"),
        pytest.param("autopar plan --prec", ["--precision"], id="options", marks=pytest.mark.slow),
    ],
)
def test_completion_names_commands_and_options(typed: str, words: list[str]) -> None:
    asked = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert shown(**asked).split() == words


def shown(*arguments: str, **environment: str) -> str:
    """The output of a command in its own process, to a pipe."""
    command = [sys.executable, "-m", "autopar.cli", *arguments]
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")}
    done = subprocess.run(command, env={**plain, **environment}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow  # the test below and test_terminal.py cover most of it
def test_no_color_and_pipes_have_no_escapes(folder: Path) -> None:
    assert "\x1b" not in shown("--help")
    assert "\x1b[" in shown("--help", FORCE_COLOR="1")
    codes = shown("--help", FORCE_COLOR="1", NO_COLOR="1").split("\x1b[")[1:]
    assert all(code.startswith(("0m", "1m", "2m", "1;", "2;")) for code in codes)  # styles such as bold, but no colours


def test_a_terminal_gets_bold_headings_and_the_same_text(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", plan_file) == 0
    bold, plain = shown("explain", plan_file, FORCE_COLOR="1"), capsys.readouterr().out
    assert re.sub(r"\x1b\[[0-9;]*m", "", bold) == plain
    assert "\x1b[1mPlan" in bold and "\x1b" not in plain
