"""The place in the user's code: the innermost frame that belongs neither to torch nor to the tracer."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import CodeType, FrameType

import torch

from autopar.python import one_process, replaced

_OURS = (
    os.path.dirname(os.path.dirname(torch.__file__)) + os.sep + "torch" + os.sep,
    os.path.dirname(__file__) + os.sep,
    replaced.__file__,  # replaced functions run code of this file
    one_process.__file__,
)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ATTEMPT = os.path.join(os.path.dirname(__file__), "attempt.py")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_foreign: dict[str, bool] = {}


@functools.cache
def is_installed(filename: str) -> bool:
    """Whether a file belongs to an installed package."""
    return not _INSTALLED.isdisjoint(Path(filename).parts)


def is_users(filename: str) -> bool:
    is_foreign = _foreign.get(filename)
    if is_foreign is None:
        is_foreign = _foreign[filename] = not filename.startswith((*_OURS, "<frozen"))
    return is_foreign


def current() -> str:
    """The place ("file:line") of the user's code that is running; "" if only the planner's code is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        is_foreign = _foreign.get(filename)  # hot path: asked for each node, for several frames
        if is_foreign or (is_foreign is None and is_users(filename)):
            return "" if filename.startswith(_PACKAGE) else _place(filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def called_at() -> str:
    """Where the running code of an installed package, other than torch, was called by code that is not installed; ""
    if the innermost of the user's code is not installed, or the model itself is."""
    frame: FrameType | None = sys._getframe(1)
    is_inside = False
    while frame is not None and frame.f_code.co_filename != _ATTEMPT:  # callers of the trace are not the model's code
        filename = frame.f_code.co_filename
        if is_users(filename) and not filename.startswith(_PACKAGE):
            if not is_installed(filename):
                return _place(filename, frame.f_lineno) if is_inside else ""
            is_inside = True
        frame = frame.f_back
    return ""


@functools.cache
def _place(filename: str, line: int) -> str:
    return f"{filename}:{line}"


def raised_at(error: BaseException, homes: Collection[str] = ()) -> str:
    """The place ("file:line") of the innermost frame in the user's own code, else in any code but torch's and ours.

    The user's own code is that in `homes` (the files of the model's modules) and in files that are not installed: where
    a library's config or cache raises an error, its caller in the user's code is named. A SyntaxError has its own line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    outside = [(file, line) for file, line in places if not file.startswith((_OURS[0], _PACKAGE, "<"))]
    own = [(file, line) for file, line in outside if file in homes or not is_installed(file)]
    file, line = (own or outside or [("", None)])[-1]
    return f"{file}:{line}" if file else ""


def callers(depth: int = 3) -> tuple[CodeType, ...]:
    """Code objects of the user's running functions, innermost first, up to the nearest `forward`."""
    codes: list[CodeType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(codes) < depth:
        code = frame.f_code
        if is_users(code.co_filename):
            if code.co_name == "forward" and codes:
                break
            codes.append(code)
        frame = frame.f_back
    return tuple(codes)
