"""Pausing Python's cyclic garbage collector while a stage makes a great many objects that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """For the duration, no collection of cycles; as a decorator, for every call.

    Each full collection walks the whole graph and its strategies again, and finds nothing: half of the time of a
    prediction. Objects without cycles are freed as always.

    >>> with collection_paused():
    ...     gc.isenabled()
    False
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
