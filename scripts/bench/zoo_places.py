"""Where an error was raised, as a record shows it."""

from __future__ import annotations

import traceback
from pathlib import Path

import autopar

_PACKAGE = str(Path(autopar.__file__).resolve().parent)


def place(error: BaseException) -> str:
    """The innermost line outside autopar and torch, else the innermost: `models/bloom/modeling_bloom.py:312`."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "site-packages/torch/" not in f.filename and not f.filename.startswith(_PACKAGE)]
    if not frames:
        return ""
    frame = (outside or list(frames))[-1]
    inner = frames[-1]
    text = f"{tail(frame.filename)}:{frame.lineno}"
    return text if inner is frame else f"{text} ({tail(inner.filename)}:{inner.lineno})"


def tail(path: str) -> str:
    """The path below site-packages, or the last two parts."""
    _, found, below = path.partition("site-packages/")
    return below if found else "/".join(Path(path).parts[-2:])
