"""`math` functions of traced sizes keep the origin: `math.sqrt(x.shape[-1])` follows the size."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from autopar.tracing.patching import attributes_set
from autopar.tracing.sizes import Traced, traced

_FUNCTIONS = ("sqrt", "log", "log2", "log10", "exp", "pow", "ceil", "floor", "trunc", "prod", "isqrt", "gcd", "lcm")


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """While inside, the `math` functions that models use on sizes return traced numbers for traced numbers."""
    with attributes_set(math, **{name: _following(getattr(math, name)) for name in _FUNCTIONS}):
        yield


def _following(function: Any) -> Any:
    def follow(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if not kwargs and any(isinstance(a, Traced) for a in args) and not isinstance(value, Traced):
            return traced(value, (function, *args))
        return value

    follow.__name__ = function.__name__
    return follow
