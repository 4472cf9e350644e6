"""What arguments must be, each told by its name where it is something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.errors import InputError


def count_of(name: str, value: Any) -> int:
    """A whole number of 1 or more.

    >>> count_of("micro_batches", 4)
    4
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        several = ""
        if name == "micro_batches" and isinstance(value, (list, tuple)):
            several = " (plan, compare and search alone choose among several)"
        raise InputError(f"{name} is {value!r}: it must be a whole number, 1 or more{several}")
    return value


def seconds_of(name: str, value: Any) -> float:
    """A number of more than 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise InputError(f"{name} is {value!r}: it must be a number, more than 0 seconds")
    return value


def texts_of(name: str, value: Any) -> tuple[str, ...]:
    """One text or several; None is none.

    >>> texts_of("constraints", "fsdp"), texts_of("constraints", None)
    (('fsdp',), ())
    """
    if value is None or isinstance(value, str):
        return (value,) if value is not None else ()
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise InputError(f"{name} is {value!r}: it must be text, or a list of texts")
    return tuple(value)
