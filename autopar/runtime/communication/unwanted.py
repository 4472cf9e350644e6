"""Collectives whose result nobody needs, since a pass ended early: by an error, or with gradients of some parameters.

They must be waited for: otherwise torch keeps their input and output in memory for good. But the last reference to a
tensor of a call may be held by a gloo thread, which then frees the call's graph. That thread must not wait, because it
has to run the very collective that it would wait for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from autopar.runtime.communication.flights import Flight

_left: deque[Flight] = deque()


def leave(flights: Iterable[Flight], thread: int) -> None:
    """End these: at once in `thread`, which launched them; in any other thread, leave them to `end_those_left`."""
    _left.extend(flights)
    if threading.get_ident() == thread:
        end_those_left()


def end_those_left() -> None:
    """Wait for the collectives that were left; called by a thread that calls models."""
    while _left:
        _left.popleft().abandon()
