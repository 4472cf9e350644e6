"""Checkpoint regions: what runs inside `torch.utils.checkpoint` runs inline and is tagged with its region.

`checkpoint` is often bound early (`from torch.utils.checkpoint import checkpoint`), so not the function is
replaced but what its body looks up: the reentrant and the non-reentrant machinery.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch.utils.checkpoint

from autopar.tracing.recorder import Recorder
from autopar.tracing.replaced import replaced


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

    def generator(function: Any, preserve: Any, context_fn: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        with region():
            yield

    machinery = torch.utils.checkpoint
    bare = machinery.checkpoint.__wrapped__  # type: ignore[attr-defined]
    saved = machinery.CheckpointFunction, machinery._checkpoint_without_reentrant_generator
    machinery.CheckpointFunction, machinery._checkpoint_without_reentrant_generator = Inline, generator  # type: ignore
    try:
        with (
            replaced(machinery.checkpoint, bare)
            if isinstance(machinery.checkpoint, FunctionType)
            else contextlib.nullcontext()
        ):
            yield
    finally:
        machinery.CheckpointFunction, machinery._checkpoint_without_reentrant_generator = saved  # type: ignore
