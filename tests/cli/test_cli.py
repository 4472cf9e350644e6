"""The command line: what it prints, and that every mistake ends with one clear line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main

TINY = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32, "vocab_size": 96, "resid_pdrop": 0.0}
GOOD = ["plan", "hf:GPT2LMHeadModel", "--mesh", "2x2", "--cluster", "cpu", "--batch", "4", "--seq", "16"]

MODULE = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)

def with_inputs():
    return Regression(), {"x": torch.empty(4, 8), "y": torch.empty(4, 8)}

class Broken(nn.Linear):
    def forward(self, x):
        raise KeyError("nothing here")

def fails_when_called():
    return Broken(8, 8), {"x": torch.empty(4, 8)}

def alone():
    return nn.Linear(8, 8)

def text():
    return "a model"

def broken():
    raise ValueError("no such thing")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a config and a module of the user's."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "users_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "users_models", raising=False)
    return tmp_path


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def _with(option: str, value: str) -> list[str]:
    """The good command with one option set to another value."""
    words = list(GOOD)
    if option in words:
        words[words.index(option) + 1] = value
        return words
    return [*words, option, value]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "hf:GPT2LMHeadModl", *GOOD[2:]], "did you mean GPT2LMHeadModel?"),
        (["plan", "hf:GPT2Config", *GOOD[2:]], "no architecture 'GPT2Config'"),
        (["plan", "hf:GPT2Model", *GOOD[2:]], "returns no loss"),
        (["plan", "hf:PreTrainedModel", *GOOD[2:]], "is abstract"),
        (["plan", "GPT2LMHeadModel", *GOOD[2:]], "names no model"),
        (["plan", "nowhere_to_be_found:f", *GOOD[2:]], "no module 'nowhere_to_be_found'"),
        (["plan", "users_models:alon", *GOOD[2:]], "did you mean alone?"),
        (["plan", "users_models:alone", *GOOD[2:]], "return (model, meta_args)"),
        (["plan", "users_models:text", *GOOD[2:]], "must return a torch.nn.Module"),
        (["plan", "users_models:broken", *GOOD[2:]], "ValueError: no such thing"),
        (["plan"], "Missing argument"),
        (GOOD[:4], "Missing option '--batch'"),
        (["plam"], "plam"),
        (_with("--mesh", "4*8"), "--mesh '4*8' is no mesh"),
        (_with("--mesh", "0x8"), "mesh shape"),
        (_with("--axis-names", "dp"), "one name an axis"),
        (_with("--axis-names", "dp,dp"), "repeat"),
        (_with("--cluster", "z80"), "'z80' is unknown"),
        (_with("--cluster", "missing.json"), "missing.json"),
        (_with("--cluster", "config.json"), "not a cluster"),
        (_with("--memory", "70"), "no unit"),
        (_with("--memory", "lots"), "'lots' is no amount of memory"),
        (_with("--batch", "0"), "--batch"),
        (_with("--batch", "four"), "--batch"),
        (_with("--micro-batches", "3"), "does not divide into 3 micro-batches"),
        (_with("--config", "missing.json"), "missing.json"),
        (_with("--config", "users_models.py"), "no config can be read"),
        (_with("--seq", "4096"), "longer than the 1024 learned positions of transformer.wpe"),
        (_with("--precision", "int8"), "'int8' is unknown"),
        (_with("--out", "nowhere/plan.json"), "no folder nowhere"),
        (["explain", "missing.json"], "no plan can be read from missing.json"),
        (["explain", "config.json"], "plan version None"),
        (["explain", "users_models.py"], "is not a plan"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code = _run(*arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_what_nobody_foresaw_is_told_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "users_models:fails_when_called", "--mesh", "2", "--cluster", "cpu", "--batch", "4"]
    assert _run(*command) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "nothing here" in error


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--version") == 0
    assert capsys.readouterr().out.startswith("autopar 0.")
    assert _run("plan", "--help") == 0
    assert "--memory" in capsys.readouterr().out


def test_a_plan_is_printed_written_and_explained_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*GOOD, "--config", "config.json", "--axis-names", "dp,tp", "--out", "plan.json") == 0
    printed = capsys.readouterr().out
    assert "dp=2 x tp=2" in printed
    assert _run("explain", "plan.json") == 0
    assert capsys.readouterr().out == printed


def test_a_function_of_the_users(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", "users_models:with_inputs", "--mesh", "2", "--cluster", "cpu", "--batch", "4") == 0
    assert "axis0=2" in capsys.readouterr().out


def test_a_reader_that_goes_away(folder: Path) -> None:
    code = "from autopar.cli import main; main(['plan', '--help'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.wait()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
