"""Checks of arguments. An error names the argument, its value, and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.errors import InputError

SOLVERS = ("highs", "cbc")
"""Solvers of integer programs. Listed here because running a plan checks the options without importing pulp."""


def count_of(name: str, value: Any) -> int:
    """A whole number of 1 or more.

    >>> count_of("micro_batches", 4)
    4
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        several = ""
        if name == "micro_batches" and isinstance(value, (list, tuple)):
            several = " (plan, compare and search alone choose among several)"
        raise InputError(f"{name} is {value!r}: it must be a whole number, 1 or more{several}")
    return value


def seconds_of(name: str, value: Any) -> float:
    """A number greater than 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise InputError(f"{name} is {value!r}: it must be a number, more than 0 seconds")
    return value


def solver_of(value: Any) -> str:
    """One of SOLVERS."""
    if value not in SOLVERS:
        raise InputError(f"solver is {value!r}: it must be one of {', '.join(SOLVERS)}")
    return str(value)


def flag_of(name: str, value: Any) -> bool:
    """True or False; values that are merely truthy or falsy, such as 1 or None, are refused."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}: it must be True or False")
    return value


def module_of(value: Any) -> nn.Module:
    """A model whose parameters and buffers have shapes and are dense."""
    if not isinstance(value, nn.Module):
        raise InputError(f"the model is of {type(value).__name__}: it must be a torch.nn.Module")
    lazy = [name for name, parameter in value.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise InputError(f"the parameter '{lazy[0]}' of a lazy module has no shape yet: call the model once first")
    for name, tensor in (*value.named_parameters(), *value.named_buffers()):
        if tensor.layout != torch.strided:
            raise InputError(
                f"'{name}' of the model is in the layout {tensor.layout}, and what a plan keeps of a model is dense: "
                "pass a sparse tensor as an argument of forward, as to_sparse_coo(), or keep to_dense() of it"
            )
    return value


def loss_of(value: Any) -> Callable[..., Any] | None:
    """The loss function, which is called with the model's output; None where the model itself returns the loss."""
    if isinstance(value, type):
        raise InputError(f"loss_fn is the class {value.__name__}: give what is called, such as {value.__name__}()")
    if value is not None and not callable(value):
        raise InputError(
            f"loss_fn is {value!r}: it must be callable with the model's output, and return the loss; for example "
            "loss_fn=lambda output, labels: torch.nn.functional.cross_entropy(output, labels), with an example of "
            "'labels' in meta_args"
        )
    return value


def check_names(call: str, names: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise TypeError, as Python itself does, for a keyword argument that a call does not take."""
    accepted = sorted(accepted)
    for name in names:
        if name not in accepted:
            raise TypeError(f"{call}() got an unexpected keyword argument '{name}'; it takes {', '.join(accepted)} too")


def texts_of(name: str, value: Any) -> tuple[str, ...]:
    """One text or several, as a tuple; None gives an empty one.

    >>> texts_of("constraints", "fsdp"), texts_of("constraints", None)
    (('fsdp',), ())
    """
    if value is None or isinstance(value, str):
        return (value,) if value is not None else ()
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise InputError(f"{name} is {value!r}: it must be text, or a list of texts")
    return tuple(value)
