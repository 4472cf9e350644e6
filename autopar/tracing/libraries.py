"""Data-free paths of libraries: a function that has one takes it if it asked for unknown data, and only then.

`torch.compiler.is_exporting()` and `is_compiling()`, which Hugging Face's `is_tracing` calls, return True to functions
that asked for unknown data in an earlier attempt. If they always returned True, models would lose choices that need no
data, such as `is_causal`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import torch

from autopar.tracing.patching import attributes_set

_QUESTIONS = ("is_exporting", "is_compiling")


class DataFreePaths:
    """The functions that are told that they are being exported or compiled; with `always`, all are."""

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.told: set[object] = set()

    def offer(self, frames: tuple[object, ...]) -> bool:
        """Tell these functions at the next attempt; False if they were told already and asked for data nevertheless."""
        new = set(frames) - self.told
        self.told |= new
        return bool(new)

    @contextlib.contextmanager
    def offered(self) -> Iterator[None]:
        """While inside, `torch.compiler`'s questions return True to these functions."""
        if not self.told and not self.always:
            yield
            return
        originals = {name: getattr(torch.compiler, name) for name in _QUESTIONS}
        answers = {name: partial(self._answer, original) for name, original in originals.items()}
        with attributes_set(torch.compiler, **answers):
            yield

    def _answer(self, original: Callable[[], bool]) -> bool:
        return self._is_told() or original()

    def _is_told(self) -> bool:
        if self.always:
            return True
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name.startswith("is_"):  # `is_tracing` asks for its caller
            frame = frame.f_back
        return frame is not None and frame.f_code in self.told
