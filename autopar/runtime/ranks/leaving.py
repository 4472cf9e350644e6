"""A clean exit of Python while gloo threads still hold tensors.

A gloo thread may still hold tensors of the last collectives when Python ends. When it releases them then, it asks for
the interpreter lock, and the process aborts although the run succeeded. So, before the interpreter is finalised, unused
objects are freed (models in reference cycles hold process groups), and the threads get time to release theirs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import time

_PAUSE_SECONDS = 0.1  # a waiting thread asks for the lock every 5 ms


@functools.cache
def leave_quietly() -> None:
    """Register the clean-up for the end of the process, once."""
    atexit.register(_let_go)


def _let_go() -> None:
    gc.collect()
    time.sleep(_PAUSE_SECONDS)
