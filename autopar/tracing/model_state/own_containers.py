"""Lists, dicts and sets that hang on modules: forward may change them in place, and a trace leaves nothing in them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

_MOST = 10_000  # elements: what is longer holds data, and is not looked through
OF_TORCH = frozenset(vars(nn.Module()))  # `_parameters` and its like


@contextlib.contextmanager
def containers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The containers in attributes of modules, and those inside of these, hold afterwards what they held.

    Else the next trace would find what this one has put there, data-free tensors and the count of its calls, and calls
    would be taken to be of another kind than the traced one.
    """
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                _look_through(value, found)
    before = [(one, dict(one) if isinstance(one, dict) else list(one)) for one in found.values()]
    try:
        yield
    finally:
        for one, held in before:
            if not _is_alike(one, held):
                one.clear()
                one.extend(held) if isinstance(one, (list, deque)) else one.update(held)


def _look_through(value: Any, found: dict[int, Any]) -> None:
    if not isinstance(value, (list, tuple, dict, set, deque)) or id(value) in found or len(value) > _MOST:
        return
    if not isinstance(value, tuple):
        found[id(value)] = value
    for inner in value.values() if isinstance(value, dict) else value:
        _look_through(inner, found)


def _is_alike(one: Any, held: Any) -> bool:
    if len(one) != len(held) or (isinstance(one, dict) and [*one] != [*held]):
        return False
    mine, its = (one.values(), held.values()) if isinstance(one, dict) else (one, held)
    return all(a is b for a, b in zip(mine, its, strict=True))
