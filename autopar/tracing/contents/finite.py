"""Checks for infinities and NaN: `if not torch.isfinite(x).all()` is answered as in a healthy step.

In training mode, models check their activations and repair them (clamp, skip) after an overflow. Which branch they take
depends on data, but it is the same in every step that trains normally: the trace assumes that x is finite, continues,
and records the place. A second trace takes the other branch; if it only adds clamps that change no finite value, it is
valid for both and is used (`contents.mends`). Otherwise `Traced.assumptions` and a warning list the places. A check of
an input itself is refused like any other question about data: there, NaN may mark a missing measurement.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.tracing.targets import methods

Tensor = torch.Tensor
# Checks, with their result for finite values; and functions that keep, negate or combine such results.
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
    """The results of checks of activations under the assumption: one truth value for all elements of a tensor."""

    def __init__(self, are_finite: bool = True) -> None:
        self.are_finite = are_finite
        self.places: dict[str, None] = {}  # places where an answer was assumed, in order
        self._said: dict[int, tuple[bool, int]] = {}  # by id of a tensor: truth value and tensor version

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any, node: fx.Node) -> None:
        """Note the truth value of a call's result, if it is such a check or combines some. `node`: the call's."""
        if func not in _NOTED or not args or not isinstance(result, Tensor):
            return
        truth = None
        if func in _CHECKS:
            is_input = any(source.op == "placeholder" for source in node.all_input_nodes)
            truth = None if is_input else _CHECKS[func]
        elif func in _KEEPING:
            truth = self._of(args[0])
        elif func in _NEGATING:
            truth = _not(self._of(args[0]))
        elif func in _COMBINING and len(args) == 2:
            first, second = self._of(args[0]), self._of(args[1])
            if first is not None and second is not None:
                truth = _COMBINING[func](first, second)
        if truth is not None:
            self._said[id(result)] = truth, result._version

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], place: str) -> bool | None:
        """The assumed answer to a question, whose place is recorded; None if it is no such check."""
        truth = self._of(args[0]) if func in _ASKING else None
        if truth is not None:
            self.places[place] = None
        return truth if self.are_finite else _not(truth)

    def _of(self, value: Any) -> bool | None:
        truth, version = self._said.get(id(value), (None, None))
        return truth if isinstance(value, Tensor) and value._version == version else None


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth
