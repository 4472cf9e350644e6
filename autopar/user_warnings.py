"""Warnings of autopar: each points at the user's own line, however deep inside autopar it is given."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

_OURS = ("autopar", "torch", "contextlib", "functools", "threading")
_LOOPS = ("transformers", "accelerate", "peft", "lightning", "pytorch_lightning")
_BETWEEN = frozenset((*_OURS, *_LOOPS))
"""Packages that stand between the user's line and ours: autopar, what it is called through, and loops of others."""


class AutoparWarning(UserWarning):
    """Base of every warning of autopar; it points at the line of the user's code that led to it."""


@dataclass(frozen=True)
class Line:
    """A line of code, for a warning that is given later or in another thread."""

    file: str
    number: int
    module: str
    registry: dict[Any, Any]
    """What Python has warned of in that module already."""

    def warn(self, text: str, category: type[Warning] = AutoparWarning) -> None:
        """Warn as if this line had."""
        warnings.warn_explicit(text, category, self.file, self.number, self.module, self.registry)


def warn(text: str, category: type[Warning] = AutoparWarning) -> None:
    """Warn at the user's line. `skip_file_prefixes` of `warnings.warn` does this too, from Python 3.12 on."""
    users_line().warn(text, category)


def users_line() -> Line:
    """The innermost running line that is in none of the packages between; the outermost one where all are."""
    frame: FrameType = sys._getframe()
    while _is_between(frame) and frame.f_back is not None:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return Line(frame.f_code.co_filename, frame.f_lineno, _module(frame) or "<unknown>", registry)


def _is_between(frame: FrameType) -> bool:
    name = _module(frame)
    return name is None or name.partition(".")[0] in _BETWEEN  # generated code, as that of a graph, has no name


def _module(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else None
