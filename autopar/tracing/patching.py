"""Attributes of modules and classes set for the duration of a trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def attributes_set(owner: Any, **values: Any) -> Iterator[None]:
    """While inside, `owner` has these attributes; afterwards exactly those it had before, also after an error.

    A module that is first imported inside (some ops import torch's compiler) may bind a replaced function under a name
    of its own; such names are set to the original too.

    >>> import math
    >>> with attributes_set(math, tau=6):
    ...     math.tau
    6
    >>> math.tau == 2 * math.pi
    True
    """
    before, imported = {name: vars(owner)[name] for name in values if name in vars(owner)}, len(sys.modules)
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
        functions = {id(values[name]): old for name, old in before.items() if callable(values[name])}
        for module in list(sys.modules.values())[imported:]:  # in the order in which they were imported
            if isinstance(module, ModuleType):
                _restore(module, functions)


def _restore(module: ModuleType, before: Mapping[int, Any]) -> None:
    """Set names of a module to the original values. `before`: these, by the id of the temporary value."""
    for name, value in list(vars(module).items()):
        if id(value) in before:
            setattr(module, name, before[id(value)])
