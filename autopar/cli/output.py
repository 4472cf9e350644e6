"""Output of the commands: reports, JSON, files and progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from autopar.arguments.text_files import write_text
from autopar.errors import InputError, PlanMismatchError
from autopar.plans import Plan


def progress(text: str) -> Status:
    """A context that shows a progress line on standard error if that is a terminal."""
    return Console(stderr=True).status(text)


def say(text: str) -> None:
    """Print a report. On a terminal, headings are bold: unindented lines after an empty one."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        print(text, end="")
        return
    styled, after_blank = Text(), True
    for line in text.splitlines(keepends=True):
        heading = after_blank and not line.startswith((" ", "("))
        styled.append(line, style="bold" if heading else "")
        after_blank = not line.strip()
    console.print(styled, end="")


def say_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def check_folder(option: str, path: Path | None) -> None:
    """InputError if a file cannot be written at `path`; called first, before minutes of planning."""
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise InputError(f"{option} {path} is a folder: name a file in it")


def write(text: str, path: Path, name: str) -> None:
    write_text(f"the {name}", path, text)
    print(f"{name} written to {path}", file=sys.stderr)


def load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except PlanMismatchError as error:
        if path.suffix in (".html", ".htm"):
            raise InputError(f"{path} is a report: name the plan that it was made of (JSON)") from error
        raise
