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
    containers: dict[int, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                _look_through(value, containers)
    before = [
        (container, dict(container) if isinstance(container, dict) else list(container))
        for container in containers.values()
    ]
    try:
        yield
    finally:
        for container, contents in before:
            if not _is_alike(container, contents):
                container.clear()
                container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)


def _look_through(value: Any, containers: dict[int, Any]) -> None:
    if kind_of(value) in (None, frozenset) or id(value) in containers or length(value) > _MOST:
        return
    if not isinstance(value, tuple):
        containers[id(value)] = value
    for inner in elements(value):
        _look_through(inner, containers)


def _is_alike(container: Any, contents: Any) -> bool:
    if len(container) != len(contents) or (isinstance(container, dict) and [*container] != [*contents]):
        return False
    mine, its = (container.values(), contents.values()) if isinstance(container, dict) else (container, contents)
    return all(a is b for a, b in zip(mine, its, strict=True))
