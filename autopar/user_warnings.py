"""Warnings of autopar. Each is attributed to the line of the user's code that led to it, not to autopar's own."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

_OURS = ("autopar", "torch", "contextlib", "functools", "threading")
_LOOPS = ("transformers", "accelerate", "peft", "lightning", "pytorch_lightning")
_BETWEEN = frozenset((*_OURS, *_LOOPS))
"""Packages whose frames are skipped: autopar, code that it is called through, and other libraries' training loops."""


class AutoparWarning(UserWarning):
    """Base of every warning of autopar; it points at the line of the user's code that led to it."""


@dataclass(frozen=True)
class Line:
    """A line of code, for a warning that is given later or in another thread."""

    file: str
    number: int
    module: str
    registry: dict[Any, Any]
    """The module's `__warningregistry__`, by which Python suppresses repeated warnings."""

    def warn(self, text: str, category: type[Warning] = AutoparWarning) -> None:
        """Warn as if this line had."""
        warnings.warn_explicit(text, category, self.file, self.number, self.module, self.registry)


def warn(text: str, category: type[Warning] = AutoparWarning) -> None:
    """Warn at the user's line. `skip_file_prefixes` of `warnings.warn` does this too, from Python 3.12 on."""
    users_line().warn(text, category)


def users_line() -> Line:
    """The innermost line on the stack outside the packages in `_BETWEEN`; the outermost line if there is none."""
    frame: FrameType = sys._getframe()
    while _is_between(frame) and frame.f_back is not None:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return Line(frame.f_code.co_filename, frame.f_lineno, _module(frame) or "<unknown>", registry)


def _is_between(frame: FrameType) -> bool:
    name = _module(frame)
    return name is None or name.partition(".")[0] in _BETWEEN  # generated code, such as a graph's, has no module


def _module(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else None
