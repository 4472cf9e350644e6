"""Argument names: those that a forward takes, also through `**kwargs`, and those that are probably misspelt."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from autopar.tracing.errors import ArgumentError
from autopar.user_warnings import warn

_ALIKE = 0.8  # least similarity of a misspelling: "use_cash" of use_cache, but not "shift_labels" of labels
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_names(
    kind: str,
    names: Iterable[str],
    model: nn.Module,
    parameters: Mapping[str, inspect.Parameter],
    of_loss: Collection[str],
) -> None:
    """ArgumentError for a name that forward does not take, or that is probably a misspelling of one that it takes.

    `**kwargs` takes any name, whatever its annotation declares: an undeclared one is accepted with a warning. `kind`:
    which of our arguments holds the names; `of_loss`: names of the loss's arguments.
    """
    own = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    declared = _declared(model, parameters)
    if declared is None:
        return
    accepted = {*own, *declared}
    for name in names:
        if name in accepted or name in of_loss:
            continue
        forward = f"{type(model).__name__}.forward"
        close = difflib.get_close_matches(str(name), sorted(accepted), n=1, cutoff=_ALIKE)
        if close or len(own) == len(parameters) or not isinstance(name, str):
            suggestion = f": did you mean {close[0]!r}?" if close else ""
            of_both = f", and loss_fn {', '.join(of_loss)} behind the output" if of_loss else ""
            raise ArgumentError(f"{kind} names {name!r}, but {forward} takes {', '.join(own)}{of_both}{suggestion}")
        warn(
            f"{kind} names {name!r}, which {forward} does not declare: its **kwargs take it, and it has no effect "
            "unless something inside reads it"
        )


def _declared(model: nn.Module, parameters: Mapping[str, inspect.Parameter]) -> set[str] | None:
    """Names that `**kwargs` may take: those of its TypedDict, of forward's decorators, and of submodules.

    Empty without `**kwargs`; None if any name is possible.
    """
    for parameter in parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            declared = typing.get_args(parameter.annotation)  # Unpack[SomeTypedDict]
            if not declared or not typing.is_typeddict(declared[0]):
                return None
            inner = (n for child in model.children() for n in inspect.signature(child.forward).parameters)
            wrapped = (n for module in (model, *model.children()) for n in _of_decorators(module.forward))
            return {*declared[0].__required_keys__, *declared[0].__optional_keys__, *inner, *wrapped}
    return set()


def _of_decorators(forward: Callable[..., Any]) -> Iterator[str]:
    """Names that decorators of a forward may take out of the keywords before it sees them.

    These occur in a decorator as a parameter, as a string in its code, or as a string among its closure's variables.
    """
    function: Any = getattr(forward, "__func__", forward)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if isinstance(function, FunctionType):
            own = inspect.signature(function, follow_wrapped=False).parameters
            yield from (n for n, p in own.items() if p.kind in _BY_NAME)
            yield from _strings(function.__code__)
            yield from (v for v in inspect.getclosurevars(function).nonlocals.values() if isinstance(v, str))
        function = inner


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
