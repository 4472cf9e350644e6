"""Replacing a Python function wherever it is bound.

A function may have been imported under many names, or captured in closures, before the trace begins. All of these share
its `__code__`, which is therefore what is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

Replacement = Callable[..., Any]
_OVERRIDES: dict[types.FunctionType, Replacement] = {}  # declared by `override`
_COPIES: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()  # made by `original`


@contextlib.contextmanager
def override(function: Callable[..., Any], replacement: Replacement) -> Iterator[None]:
    """While inside, traces call `replacement` where the model calls `function`.

    Raises TypeError for what is not a Python function.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is not a Python function: wrap it in one, and override that")
    _OVERRIDES[function] = replacement
    try:
        yield
    finally:
        del _OVERRIDES[function]


@contextlib.contextmanager
def overrides_active() -> Iterator[None]:
    """While inside, all overrides declared with `override` are in effect."""
    with contextlib.ExitStack() as stack:
        for function, replacement in _OVERRIDES.items():
            stack.enter_context(replaced(function, replacement))
        yield


@contextlib.contextmanager
def replaced(function: types.FunctionType, replacement: Replacement) -> Iterator[None]:
    """While inside, calling `function` calls `replacement`."""
    code = function.__code__
    function.__code__ = forwarding(replacement, code)
    try:
        yield
    finally:
        function.__code__ = code


def original(function: types.FunctionType) -> types.FunctionType:
    """A copy of a function that keeps its current behaviour."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    _COPIES.add(copy)
    return copy


def is_copy(function: types.FunctionType) -> bool:
    """Whether `original` made this function. Copies of finished traces live until the next full collection."""
    return function in _COPIES


_MARK = "the replacement stands here"  # a constant of the generated code, which `forwarding` replaces


def forwarding(replacement: Replacement, like: types.CodeType) -> types.CodeType:
    """Code that calls `replacement`. To be assigned as `__code__`, it needs as many free variables as `like`."""
    inner = _calling(len(like.co_freevars))
    constants = tuple(replacement if c == _MARK else c for c in inner.co_consts)
    return inner.replace(co_consts=constants, co_name=like.co_name, co_filename=__file__)


@functools.cache
def _calling(variables: int) -> types.CodeType:
    """Code of a function that calls the marked constant with all its arguments, and has so many free variables."""
    names = [f"v{i}" for i in range(variables)]
    source = "\n".join([
        "def outer():",
        *(f"    {name} = None" for name in names),
        "    def inner(*args, **kwargs):",
        *(f"        {name}" for name in names),
        f"        return {_MARK!r}(*args, **kwargs)",
        "    return inner",
    ])  # fmt: skip
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # it calls a string, which `forwarding` replaces
        exec(source, namespace)
    inner: types.CodeType = namespace["outer"]().__code__
    return inner
