"""Running torch functions on data-free tensors, with memoised results.

Most meta kernels are Python, and the layers of a model repeat. If a call's result shares no memory with its arguments,
it depends only on their shapes, strides and dtypes. A second such call gets a new tensor like the first one's result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.contents.one_dtype import check_dtypes
from autopar.tracing.values import PLAIN

Tensor = torch.Tensor


class Runs:
    """A cache of results of calls on data-free tensors."""

    def __init__(self) -> None:
        self._seen: dict[Any, Tensor | _Outcome] = {}

    def repeated_result(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
        """The result of a call that ran before, wrote nothing and made one tensor; None for any other call."""
        key = _key(func, args, kwargs)
        outcome = None if key is None else self._seen.get(key)
        if isinstance(outcome, Tensor):
            return outcome.clone()
        return func(*args, **kwargs) if outcome is _Outcome.VIEW else None

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`, or a new tensor like its earlier result.

        Raises RuntimeError if kernels with data refuse the arguments for their dtypes.
        """
        check_dtypes(func, args, kwargs)
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        outcome = self._seen.get(key)
        if isinstance(outcome, Tensor):
            return outcome.clone()
        if outcome is not None:
            return func(*args, **kwargs)
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = [t._version for t in inputs]
        result = func(*args, **kwargs)
        self._seen[key] = _Outcome.OTHER
        if isinstance(result, Tensor) and versions == [t._version for t in inputs]:
            self._seen[key] = _outcome(result, inputs)
        return result


class _Outcome(enum.Enum):
    VIEW = "a tensor that is none of the arguments, and looks into one; nothing is written"
    OTHER = "anything else"


def _key(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Everything that a meta kernel can see of a call, hashable; None where that cannot be described."""
    if torch._C._is_any_autocast_enabled():
        return None
    parts: list[Any] = [func, torch.is_grad_enabled(), torch.get_default_dtype()]
    try:
        for value in args:
            _describe(value, parts)
        for name, value in kwargs.items():
            parts.append(name)
            _describe(value, parts)
        key = tuple(parts)
        hash(key)
    except TypeError:
        return None
    return key


def _describe(value: Any, parts: list[Any]) -> None:
    """Append to `parts` everything that a meta kernel can see of a value; TypeError where that cannot be described."""
    kind = type(value)
    if kind in PLAIN:
        parts += (kind, value)
    elif isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError("a tensor with data is not described by its shape")
        parts += (Tensor, value.shape, value.stride(), value.dtype, value.requires_grad)
    elif isinstance(value, (tuple, list)):
        parts += (kind, len(value))
        for item in value:
            _describe(item, parts)
    elif isinstance(value, dict):
        parts += (kind, len(value))
        for name, item in value.items():
            parts.append(name)
            _describe(item, parts)
    elif isinstance(value, slice):
        parts += (slice, value.start, value.stop, value.step)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbol is not described by its value")
    else:
        parts += (kind, value)


def _outcome(result: Tensor, inputs: list[Tensor]) -> Tensor | _Outcome:
    """The cache entry for a call that wrote nothing: if the result has its own memory, a tensor to `clone`.

    A leaf tensor that requires a gradient is not cached, as `clone` gives no leaf.
    """
    if type(result) is not Tensor or not result.is_meta or any(result is t for t in inputs):
        return _Outcome.OTHER
    storage = result.untyped_storage()._cdata
    if any(storage == t.untyped_storage()._cdata for t in inputs):
        return _Outcome.VIEW
    if result.requires_grad and result.is_leaf:
        return _Outcome.OTHER
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    if result.requires_grad:
        like.requires_grad_()
    return like if like.clone().stride() == result.stride() else _Outcome.OTHER
