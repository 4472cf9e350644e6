"""Colours are used on a terminal, but not with NO_COLOR or in pipes; shell completion is available."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GOOD, run

# Runs each command twice, without and with NO_COLOR; a separator line tells the outputs apart.
ON_A_TERMINAL = """
import os
from autopar.cli import main
for words in (["explain", "plan.json"], ["zoo"], ["--help"], ["plan", "gpt3"]):
    for without in (False, True):
        os.environ.pop("NO_COLOR", None)
        os.environ.update({"NO_COLOR": "1"} if without else {})
        print("=====", words[0], "without" if without else "with", flush=True)
        try:
            main(words)
        except SystemExit:
            pass
"""
COLOUR = re.compile(r"\x1b\[(?:3[0-9]|4[0-9]|9[0-9]|[0-9;]*;3[0-9])[0-9;]*m")


def _on_a_terminal(folder: Path) -> dict[tuple[str, str], str]:
    """The output of each command on a terminal, by its name and `with` or `without` colour."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], cwd=folder, env=environment, stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    told = b""
    while True:
        try:
            told += os.read(ours, 1 << 16)
        except OSError:  # the other end has been closed
            break
    process.wait()
    os.close(ours)
    parts = re.split(r"===== (\S+) (with|without)\r?\n", told.decode())
    return {(parts[i], parts[i + 1]): parts[i + 2] for i in range(1, len(parts), 3)}


def test_colours_are_for_terminals_that_want_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*GOOD, "--config", "config.json", "--out", "plan.json") == 0
    assert "\x1b" not in capsys.readouterr().out  # output is a pipe
    told = _on_a_terminal(folder)
    assert len(told) == 8
    assert "\x1b[1m" in told["explain", "with"]  # headings are bold
    assert COLOUR.search(told["--help", "with"])
    for (command, colour), text in told.items():
        assert text.strip(), command
        if colour == "without":
            assert not COLOUR.search(text), (command, text)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    captured = capsys.readouterr()
    assert "search" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("autopar se", "search"), ("autopar plan --mic", "--micro-batches"), ("autopar com", "compare")],
)
def test_a_shell_is_told_what_fits(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_AUTOPAR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert run() == 0
    assert capsys.readouterr().out.split() == [offered]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_shells(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_AUTOPAR_COMPLETE", f"source_{shell}")
    assert run() == 0
    assert "_AUTOPAR_COMPLETE" in capsys.readouterr().out
