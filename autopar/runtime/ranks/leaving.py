"""Leaving Python while gloo's threads are idle.

A thread of gloo may still hold tensors of the last collectives when Python ends; when it lets go of them then, it asks
for the interpreter lock, and the process aborts although all went well. So, before the interpreter is taken down, what
is not used any more is freed (models in cycles hold process groups) and the threads get time to let go.
"""

from __future__ import annotations

import atexit
import functools
import gc
import time

_PAUSE_SECONDS = 0.1  # the lock is asked for every 5 ms


@functools.cache
def leave_quietly() -> None:
    """Arrange for it, once a process."""
    atexit.register(_let_go)


def _let_go() -> None:
    gc.collect()
    time.sleep(_PAUSE_SECONDS)
