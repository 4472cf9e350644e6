"""Environment variables. An error about an invalid value names the variable and says what to do about it."""

from __future__ import annotations

import os

from autopar.errors import InputError


def number_in(name: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number that torchrun sets. Where it is not set: `default`, or InputError if there is no default.

    >>> number_in("NOBODY_SETS_THIS", 8)
    8
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal() or int(text) < least:
        value_text = "not set" if text is None else repr(text)
        unset = "" if default is None else ", or unset it"
        raise InputError(
            f"the environment variable {name} is {value_text}: it must be a whole number, {least} or more; start with "
            f"torchrun, which sets it, set it right{unset}"
        )
    return int(text)


def is_on(name: str) -> bool:
    """Whether a feature is on, as by default; a variable turns it off with 0. InputError for neither 0 nor 1."""
    text = os.environ.get(name, "1")
    if text not in ("0", "1"):
        raise InputError(f"the environment variable {name} is {text!r}: set it to 0 for off, or to 1, or unset it")
    return text == "1"
