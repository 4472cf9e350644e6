"""Checkpoint regions: code inside `torch.utils.checkpoint` runs inline, and its nodes are tagged with their region.

`checkpoint` is often bound early (`from torch.utils.checkpoint import checkpoint`), so what is replaced is not this
function but what its body looks up: the reentrant and the non-reentrant implementation. Its outer wrapper, which would
import torch._dynamo, is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch.utils.checkpoint as machinery

from autopar.python.replaced import replaced
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder

_SHELL = machinery.checkpoint
_BARE: Any = getattr(_SHELL, "__wrapped__", None)
_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)  # the latter since torch 2.14


@contextlib.contextmanager
def checkpoint_regions(recorder: Recorder, *, tagged: bool = True) -> Iterator[None]:
    """While inside, checkpointed code runs inline; `recorder.region` is its path of region numbers."""
    count = 0

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        nonlocal count
        outer = recorder.region
        if tagged:
            recorder.region = (*outer, count)
            count += 1
        try:
            yield
        finally:
            recorder.region = outer

    class Inline:
        """Stands for the autograd function of the reentrant kind."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    def generator(*_: Any, **options: Any) -> Iterator[None]:
        with region():
            yield

    shell = replaced(_SHELL, _BARE) if _BARE and isinstance(_SHELL, FunctionType) else contextlib.nullcontext()
    generators = {name: generator for name in _GENERATORS if hasattr(machinery, name)}
    inline = attributes_set(machinery, CheckpointFunction=Inline, **generators)
    with shell, inline:
        yield
