"""Files of text that users name: where one is, and one written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autopar.errors import InputError


def path_of(what: str, value: Any, done: str = "read from") -> Path:
    """Where something is, or goes; InputError for what is no path."""
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(f"{what} is {done} a path, and {type(value).__name__} is none: give text or a Path")
    return Path(value)


def write_text(what: str, path: str | Path, text: str) -> None:
    """Write a file of text, in UTF-8; InputError where it cannot be written."""
    file = path_of(what, path, "written to")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        way = "" if file.parent.is_dir() else f"; there is no folder {file.parent}: make it first"
        raise InputError(f"{what} cannot be written to {file}: {error}{way}") from error
