"""Collectives that nobody wants any more: a pass ended early, by an error or with the gradients of some parameters.

What is never waited for torch keeps for good, with the memory of both sides. But a thread of gloo's may be the last to
hold a tensor of a call, and so the one that frees its graph. It must not wait: it is to run what it would wait for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from autopar.runtime.communication.flights import Flight

_left: deque[Flight] = deque()


def leave(flights: Iterable[Flight], thread: int) -> None:
    """End these, at once in the thread of this number, where they began; elsewhere they wait for `end_those_left`."""
    _left.extend(flights)
    if threading.get_ident() == thread:
        end_those_left()


def end_those_left() -> None:
    """Wait for what was left before, in a thread that makes calls."""
    while _left:
        _left.popleft().abandon()
