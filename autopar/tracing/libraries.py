"""Libraries that have a data-free path for tracing are sent down it where they asked for unknown data, and only there.

`torch.compiler.is_exporting()` and `is_compiling()`, on which Hugging Face's `is_tracing` rests, answer yes
to the functions that asked for unknown data on an earlier attempt. Answered always, models would lose the
choices that need no data, such as `is_causal`.
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
    """Which functions are told that they are being traced; `always`: all of them."""

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.told: set[object] = set()

    def offer(self, frames: tuple[object, ...]) -> bool:
        """Tell these functions next time; False if they were told already, and asked all the same."""
        new = set(frames) - self.told
        self.told |= new
        return bool(new)

    @contextlib.contextmanager
    def offered(self) -> Iterator[None]:
        """While inside, the functions that are to be told receive yes."""
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
        while frame is not None and frame.f_code.co_name.startswith("is_"):  # `is_tracing` and the like ask for others
            frame = frame.f_back
        return frame is not None and frame.f_code in self.told
