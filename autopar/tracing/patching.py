"""Attributes of modules and classes set for the duration of a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attributes_set(owner: Any, **values: Any) -> Iterator[None]:
    """While inside, `owner` has these attributes; afterwards exactly what it had, also after an error.

    >>> import math
    >>> with attributes_set(math, tau=6):
    ...     math.tau
    6
    >>> math.tau == 2 * math.pi
    True
    """
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
