"""The command line takes what is documented; the wording of warnings."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import run

import autopar.cli.app
import autopar.cli.reading
from autopar.errors import InputError
from autopar.planning.leaf_requests import LeafWarning


def test_the_documentation_names_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    commands: dict[str, Any] = typer.main.get_command(autopar.cli.app.app).commands  # type: ignore[attr-defined]
    options = {word for command in commands.values() for p in command.params for word in p.opts if word[0] == "-"}
    assert {"--mesh", "--most-axes", "--time-limit"} < options
    assert {word for word in options - {"--help"} if f"`{word}`" not in page} == set()


def test_warnings_of_autopar_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def warned(path: object) -> None:
        told.append(warnings.formatwarning("a thing\nto know", UserWarning, autopar.cli.reading.__file__, 1))
        told.append(warnings.formatwarning("at a\nline", LeafWarning, "/theirs.py", 1))
        told.append(warnings.formatwarning("of another", UserWarning, "/theirs.py", 1))
        raise InputError("enough")

    before = warnings.formatwarning
    monkeypatch.setattr(autopar.cli.reading, "load_plan", warned)
    assert run("explain", "plan.json") == 2
    assert told[0] == "warning: a thing to know\n"
    assert told[1] == "warning: at a line\n"
    assert told[2].startswith("/theirs.py:1: UserWarning: of another")
    assert warnings.formatwarning is before


def test_a_picture_without_matplotlib_is_refused_before_planning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("simulate", "users_models:with_inputs", "--mesh", "2", "--picture", "step.png") == 2
    assert "pictures need the package matplotlib: pip install" in capsys.readouterr().err
