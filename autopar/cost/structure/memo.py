"""A dict that computes missing entries: in a large graph with equal blocks, most entries are never asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Memo(dict[Any, Any]):
    """A dict that computes a missing entry by `find` and keeps it.

    >>> squares = Memo(lambda n: n * n)
    >>> squares[3], dict(squares)
    (9, {3: 9})
    """

    def __init__(self, find: Callable[[Any], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: Any) -> Any:
        value = self[key] = self._find(key)
        return value
