"""A table that fills as it is asked: of a large graph with equal blocks, most is never asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Found(dict[Any, Any]):
    """Asks `find` for what it has not been asked for yet.

    >>> squares = Found(lambda n: n * n)
    >>> squares[3], dict(squares)
    (9, {3: 9})
    """

    def __init__(self, find: Callable[[Any], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: Any) -> Any:
        found = self[key] = self._find(key)
        return found
