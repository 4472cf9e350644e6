"""What a call does to its arguments beside returning a result, which one op cannot do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 4


class EffectError(Exception):
    """A call changes its arguments; the text says what it does."""


class Effects:
    """The arguments of a call before it, to be compared with those after."""

    def __init__(self, args: Any, kwargs: Any, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._parameters = [(one, one._version) for one in parameters]
        held = list(_held((args, kwargs), _DEPTH))
        self._versions = [(one, one._version) for one in held if isinstance(one, torch.Tensor)]
        self._containers = [(one, content(one)) for one in held if not isinstance(one, torch.Tensor)]

    def check(self, *, inside: bool = False) -> None:
        """Raise EffectError where the call has changed them; containers have what they had again.

        `inside` another one, arguments may change, but no parameter.
        """
        changed = False
        for one, before in () if inside else self._containers:
            if not same(content(one), before):
                _put_back(one, before)
                changed = True
        if changed:
            what = "puts something into a list, dict or object that it is given"
            raise EffectError(f"{what} (let it return that, and train without caches)")
        if not inside and any(tensor._version != version for tensor, version in self._versions):
            raise EffectError("writes into a tensor that it is given")
        if any(parameter._version != version for parameter, version in self._parameters):
            raise EffectError("writes into a parameter (do that after optimizer.step(), under torch.no_grad())")


def _held(value: Any, depth: int) -> Iterator[Any]:
    """Tensors, and what else can be changed, in some arguments."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (list, dict)) or _is_object(value):
        yield value
    inside = content(value) if depth else ()
    for one in inside.values() if isinstance(inside, Mapping) else inside:
        yield from _held(one, depth - 1)


def content(value: Any) -> Any:
    """What is in a list, tuple, dict or object, as it is now."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if _is_object(value) else ()


def _is_object(value: Any) -> bool:
    """Whether it is one of somebody's own class, which holds what it has in attributes."""
    if isinstance(value, (nn.Module, type)) or callable(value):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def same(now: Any, before: Any) -> bool:
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
