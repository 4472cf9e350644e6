"""Text files that users name: their paths, and writing them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autopar.errors import InputError


def path_of(name: str, value: Any, done: str = "read from") -> Path:
    """The path to read something from or write it to; InputError for a value that is no path."""
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(f"{name} is {done} a path, and {type(value).__name__} is none: give text or a Path")
    return Path(value)


def write_text(name: str, path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; InputError where it cannot be written."""
    file = path_of(name, path, "written to")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        way = "" if file.parent.is_dir() else f"; there is no folder {file.parent}: make it first"
        raise InputError(f"{name} cannot be written to {file}: {error}{way}") from error
