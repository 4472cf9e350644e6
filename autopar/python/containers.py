"""What lists, tuples, dicts and sets hold, by the methods of the built-in type.

A subclass may refuse its own (`len()` of `Irrep` of e3nn, which is a tuple), or run code of the model in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

_KINDS = (tuple, list, dict, set, frozenset, deque)


def kind_of(value: Any) -> type | None:
    """The built-in type that a value is an instance of, if it is a container.

    >>> kind_of((1, 2)), kind_of({}), kind_of("text")
    (<class 'tuple'>, <class 'dict'>, None)
    """
    return next((kind for kind in _KINDS if isinstance(value, kind)), None)


def length(value: Any) -> int:
    """The number of elements of a container."""
    kind: Any = kind_of(value)
    count: int = kind.__len__(value)
    return count


def elements(value: Any) -> Iterable[Any]:
    """The elements of a container, of a dict the values."""
    kind: Any = kind_of(value)
    found: Iterable[Any] = dict.values(value) if kind is dict else kind.__iter__(value)
    return found
