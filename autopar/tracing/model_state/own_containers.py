"""Lists, dicts and sets in attributes of modules: forward may change them in place, and a trace restores them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from autopar.python.containers import elements, kind_of, length

_MOST = 10_000  # elements: a longer container holds data, and is not searched
OF_TORCH = frozenset(vars(nn.Module()))  # `_parameters` and the like


@contextlib.contextmanager
def containers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At the end, the containers in attributes of modules, and containers nested in them, have their earlier contents.

    Otherwise data-free tensors and counts of calls that the trace put there would be seen by the next trace, and later
    calls would seem to be of another kind than the traced one.
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
    if kind_of(value) in (None, frozenset) or id(value) in found or length(value) > _MOST:
        return
    if not isinstance(value, tuple):
        found[id(value)] = value
    for inner in elements(value):
        _look_through(inner, found)


def _is_alike(one: Any, held: Any) -> bool:
    if len(one) != len(held) or (isinstance(one, dict) and [*one] != [*held]):
        return False
    mine, its = (one.values(), held.values()) if isinstance(one, dict) else (one, held)
    return all(a is b for a, b in zip(mine, its, strict=True))
