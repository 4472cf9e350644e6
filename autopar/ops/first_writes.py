"""What a forward writes into a parameter before anything reads it (`FIRST_WRITES` of the graph), and doing it.

A trace finds such writes (`rewriting.first_writes`), and each call of a planned model begins with them
(`stored.first_writes`). All take each element for itself, so that they are the same on every shard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Writes = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""Methods in order, each with its arguments and keyword arguments."""


@dataclass(frozen=True)
class OfParameter:
    """In `Writes`: the elements of the parameter of this name."""

    name: str


@dataclass(frozen=True)
class Computed:
    """In `Writes`: what a function of `ELEMENTWISE`, by name, makes of numbers, parameters and what is computed."""

    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


_OPERATORS = {f"operator.{one.__name__}": one for one in (operator.add, operator.mul, operator.sub, operator.truediv)}
ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    **_OPERATORS,
    **{f"torch.{name}": getattr(torch, name) for name in ("add", "div", "lerp", "mul", "sub")},
}


def write_into(tensor: torch.Tensor, writes: Writes, named: Callable[[str], torch.Tensor]) -> None:
    """Do what `FIRST_WRITES` says; autograd sees nothing of it.

    `named`: the elements of another parameter that these of `tensor` stand beside.
    """

    def value_of(argument: Any) -> Any:
        if isinstance(argument, OfParameter):
            return named(argument.name)
        if isinstance(argument, Computed):
            keywords = {name: value_of(value) for name, value in argument.kwargs}
            return ELEMENTWISE[argument.function](*map(value_of, argument.args), **keywords)
        return argument

    with torch.no_grad():
        # The compiler loses writes through `data`. Elsewhere one through `detach` would be counted, and backward of an
        # earlier call refuse it.
        written = tensor.detach() if torch.compiler.is_compiling() else tensor.data
        for method, args, kwargs in writes:
            values = [value_of(argument) for argument in args]
            getattr(written, method)(*values, **{name: value_of(value) for name, value in kwargs})
