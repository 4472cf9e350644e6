"""Pausing Python's cyclic garbage collector while a stage creates a great many objects that all stay alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Turn cyclic garbage collection off inside; as a decorator, in every call.

    Each full collection would walk the whole graph and its strategies and find nothing; this was half of the time of a
    prediction. To avoid one right after a plan is made as well, all objects are moved to the oldest generation at the
    end. Objects that are not in cycles are freed as always.

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
            all_are_old()
            gc.enable()


def all_are_old() -> None:
    """Move all objects to the oldest generation without examining them, as a collection that finds no garbage would.

    Any garbage among them is found by the next full collection.
    """
    if gc.get_freeze_count():  # the caller has frozen objects: `unfreeze` would undo that
        gc.collect(1)
        return
    gc.freeze()
    gc.unfreeze()
