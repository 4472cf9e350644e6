"""What commands print and write: text, JSON, files, and a word on what is going on."""

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
    """A line on standard error while it is used as a context, where that is a terminal."""
    return Console(stderr=True).status(text)


def say(text: str) -> None:
    """Print a report; on a terminal its headings are bold (lines that begin at the margin after a blank one)."""
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
    """Before minutes of work: the folder of what is to be written is there."""
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise InputError(f"{option} {path} is a folder: name a file in it")


def write(text: str, path: Path, what: str) -> None:
    write_text(f"the {what}", path, text)
    print(f"{what} written to {path}", file=sys.stderr)


def load_plan(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except PlanMismatchError as error:
        if path.suffix in (".html", ".htm"):
            raise InputError(f"{path} is a report: name the plan that it was made of (JSON)") from error
        raise
