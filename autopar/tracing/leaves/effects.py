"""Effects of a call on its arguments, besides its result; a call that is one op must have none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 4  # levels of containers and objects in arguments that are checked


class EffectError(Exception):
    """A call changes its arguments; the text says what it does."""


class Effects:
    """A snapshot of a call's arguments, for comparison with those after it."""

    def __init__(self, args: Any, kwargs: Any, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._parameters = [(value, value._version) for value in parameters]
        mutable = list(_tensors_and_containers((args, kwargs), _DEPTH))
        self._versions = [(value, value._version) for value in mutable if isinstance(value, torch.Tensor)]
        self._containers = [(value, content(value)) for value in mutable if not isinstance(value, torch.Tensor)]

    def check(self, *, inside: bool = False) -> None:
        """Raise EffectError if the call has changed them; containers get their earlier contents back.

        `inside`: the call is part of another leaf's, so that arguments may change, but no parameter.
        """
        changed = False
        for container, before in () if inside else self._containers:
            if not same_content(content(container), before):
                _put_back(container, before)
                changed = True
        if changed:
            effect = "puts something into a list, dict or object that it is given"
            raise EffectError(f"{effect} (let it return that, and train without caches)")
        if not inside and any(tensor._version != version for tensor, version in self._versions):
            raise EffectError("writes into a tensor that it is given")
        if any(parameter._version != version for parameter, version in self._parameters):
            raise EffectError("writes into a parameter (do that after optimizer.step(), under torch.no_grad())")


def _tensors_and_containers(value: Any, depth: int) -> Iterator[Any]:
    """Tensors and mutable objects in arguments."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (list, dict)) or _is_object(value):
        yield value
    inside = content(value) if depth else ()
    for item in inside.values() if isinstance(inside, Mapping) else inside:
        yield from _tensors_and_containers(item, depth - 1)


def content(value: Any) -> Any:
    """A copy of the contents of a list, tuple, dict or object."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if _is_object(value) else ()


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class with its data in attributes."""
    if isinstance(value, (nn.Module, type)) or callable(value):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def same_content(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is before[key] for key in now)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _put_back(value: Any, before: Any) -> None:
    if isinstance(value, list):
        value[:] = before
    else:
        content = value if isinstance(value, dict) else vars(value)
        content.clear()
        content.update(before)
