"""Writes that forward makes into a parameter before anything reads it (`FIRST_WRITES` of the graph), and applying them.

Tracing finds these writes (`rewriting.first_writes`), and each call of a planned model begins by applying them
(`stored.first_writes`). All of them are elementwise, so they can be applied to each shard separately.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Writes = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""The in-place methods to call, in order, each with its arguments and keyword arguments."""


@dataclass(frozen=True)
class OfParameter:
    """An argument in `Writes`: the corresponding elements of the parameter or buffer of this name."""

    name: str


@dataclass(frozen=True)
class Computed:
    """An argument in `Writes`: the result of a function of `ELEMENTWISE`, given by its name.

    Its arguments are numbers, parameters (`OfParameter`) or other `Computed` values.
    """

    function: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


_OPERATORS = {f"operator.{one.__name__}": one for one in (operator.add, operator.mul, operator.sub, operator.truediv)}
# By name: the functions that a `Computed` may name.
ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    **_OPERATORS,
    **{f"torch.{name}": getattr(torch, name) for name in ("add", "div", "lerp", "mul", "sub")},
}


def write_into(tensor: torch.Tensor, writes: Writes, named: Callable[[str], torch.Tensor]) -> None:
    """Apply the writes of `FIRST_WRITES` to a tensor, unseen by autograd.

    `named`: for the name of another parameter or a buffer, the elements that correspond to those of `tensor`.
    """

    def value_of(argument: Any) -> Any:
        if isinstance(argument, OfParameter):
            return named(argument.name)
        if isinstance(argument, Computed):
            keywords = {name: value_of(value) for name, value in argument.kwargs}
            return ELEMENTWISE[argument.function](*map(value_of, argument.args), **keywords)
        return argument

    with torch.no_grad():
        # torch.compile loses writes through `data`. In eager mode, a write through `detach` would raise the version
        # counter, and backward of an earlier call would then fail.
        written = tensor.detach() if torch.compiler.is_compiling() else tensor.data
        for method, args, kwargs in writes:
            values = [value_of(argument) for argument in args]
            getattr(written, method)(*values, **{name: value_of(value) for name, value in kwargs})
