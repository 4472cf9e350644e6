"""Checks for infinities and NaN: `if not torch.isfinite(x).all()` is answered as a healthy step answers it.

Models look at their activations in training mode and mend them (clamp, skip) where they overflowed. Which way they go
depends on data, but in all steps that are worth anything it is one way: the trace takes x to be finite, goes on, and
keeps the place. A second trace goes the other way; where it adds clamps alone that change no finite value, it is right
for both and is taken (`contents.mends`). Else `Traced.assumptions` and a warning tell the places. What a user
hands in is another matter: NaN may mean that a measurement is missing, so such a check of an input itself is refused
like any other question about data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.tracing.targets import methods

Tensor = torch.Tensor
_CHECKS = {
    **dict.fromkeys(methods("isfinite"), True),
    **dict.fromkeys(methods("isinf", "isnan", "isposinf", "isneginf"), False),
}
_KEEPING = methods("any", "all", "clone", "detach", "flatten", "reshape", "view")
_NEGATING = methods("logical_not", "bitwise_not", "__invert__")
_COMBINING: dict[Any, Callable[[bool, bool], bool]] = {
    **dict.fromkeys(methods("logical_or", "bitwise_or", "__or__"), operator.or_),
    **dict.fromkeys(methods("logical_and", "bitwise_and", "__and__"), operator.and_),
}
_NOTED = _CHECKS.keys() | _KEEPING | _NEGATING | _COMBINING.keys()
_ASKING = methods("__bool__", "item", "is_nonzero")


class FiniteChecks:
    """What checks of activations say if these are finite, or not: one truth value for all elements of a tensor."""

    def __init__(self, are_finite: bool = True) -> None:
        self.are_finite = are_finite
        self.places: dict[str, None] = {}  # where an answer was taken for granted, in order
        self._said: dict[int, tuple[bool, int]] = {}  # by identity: the value, and the version it holds for

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any, node: fx.Node) -> None:
        """Follow a call that `node` stands for."""
        if func not in _NOTED or not args or not isinstance(result, Tensor):
            return
        said = None
        if func in _CHECKS:
            is_input = any(source.op == "placeholder" for source in node.all_input_nodes)
            said = None if is_input else _CHECKS[func]
        elif func in _KEEPING:
            said = self._of(args[0])
        elif func in _NEGATING:
            said = _not(self._of(args[0]))
        elif func in _COMBINING and len(args) == 2:
            first, second = self._of(args[0]), self._of(args[1])
            if first is not None and second is not None:
                said = _COMBINING[func](first, second)
        if said is not None:
            self._said[id(result)] = said, result._version

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], place: str) -> bool | None:
        """The answer to a question, which is taken for granted from now on; None where it is no such check."""
        said = self._of(args[0]) if func in _ASKING else None
        if said is not None:
            self.places[place] = None
        return said if self.are_finite else _not(said)

    def _of(self, value: Any) -> bool | None:
        said, version = self._said.get(id(value), (None, None))
        return said if isinstance(value, Tensor) and value._version == version else None


def _not(said: bool | None) -> bool | None:
    return None if said is None else not said
