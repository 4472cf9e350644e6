"""Helpers that run commands in this process, and that check refused ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.cli import main

TINY = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32, "vocab_size": 96, "resid_pdrop": 0.0}

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

def in_double():
    model, inputs = with_inputs()
    return model.double(), {name: tensor.double() for name, tensor in inputs.items()}

def wider():
    model = Regression()
    model.layer = nn.Linear(8, 8, bias=False)
    return model, {"x": torch.empty(4, 8), "y": torch.empty(4, 8)}

def longer():
    return Regression(), {"x": torch.empty(6, 8), "y": torch.empty(6, 8)}

class Broken(nn.Linear):
    def forward(self, x):
        raise KeyError("nothing here")

def fails_when_called():
    return Broken(8, 8), {"x": torch.empty(4, 8)}

def alone():
    return nn.Linear(8, 8)

def text():
    return "a model"

def misbuilt():
    return nn.Linear("8", 8), {}

def broken():
    raise ValueError("no such thing")
"""

GOOD = ["plan", "hf:GPT2LMHeadModel", "--mesh", "2x2", "--cluster", "cpu", "--batch", "4", "--seq", "16"]


def put_users_files(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Change into `folder`, and write a config and a module of models there."""
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "typo.json").write_text(json.dumps({"n_layre": 2}))
    (folder / "no_config.json").write_text(json.dumps({"nodes": []}))
    (folder / "users_models.py").write_text(MODULE)
    patch.chdir(folder)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    patch.delitem(sys.modules, "users_models", raising=False)


def run(*arguments: str) -> int:
    """Run a command; returns its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def with_option(option: str, value: str, command: Sequence[str] = GOOD) -> list[str]:
    """A valid command with one option set to another value."""
    words = list(command)
    if option in words:
        words[words.index(option) + 1] = value
        return words
    return [*words, option, value]


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], words: str) -> None:
    """Check for exit code 2, no standard output, and one line on standard error that contains `words`."""
    code = run(*arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, ""), captured
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
