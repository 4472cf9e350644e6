"""Running torch functions on data-free tensors; what ran before with the same shapes is not computed again.

Most meta kernels are Python, and the layers of a model repeat. A call whose result shares nothing with its
arguments depends on their shapes, strides and dtypes alone, so its second occurrence gets a new tensor like
the first one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tensor = torch.Tensor


class Runs:
    """Remembers for calls on data-free tensors what came out."""

    def __init__(self) -> None:
        self._seen: dict[Any, Tensor | None] = {}

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`func(*args, **kwargs)`, or a new tensor like the one it made before."""
        key = self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        like = self._seen.get(key)
        if like is not None:
            return like.clone() if like.requires_grad else torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device="meta"
            )  # fmt: skip
        if key in self._seen:  # this function's results share storage with its arguments, or are no single tensor
            return func(*args, **kwargs)
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = [t._version for t in inputs]
        result = func(*args, **kwargs)
        self._seen[key] = None
        if isinstance(result, Tensor) and versions == [t._version for t in inputs]:
            self._seen[key] = _prototype(result, inputs)
        return result

    def _key(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            return None
        parts: list[Any] = [func, torch.is_grad_enabled(), torch.get_default_dtype()]
        try:
            _describe(args, parts)
            if kwargs:
                _describe(kwargs, parts)
            key = tuple(parts)
            hash(key)
        except TypeError:
            return None
        return key


def _describe(value: Any, parts: list[Any]) -> None:
    """Append to `parts` all that a meta kernel can see of a value; TypeError for what cannot be described."""
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            raise TypeError("a tensor with data is not described by its shape")
        parts += (Tensor, value.shape, value.stride(), value.dtype, value.requires_grad)
    elif isinstance(value, (tuple, list)):
        parts += (type(value), len(value))
        for item in value:
            _describe(item, parts)
    elif isinstance(value, dict):
        for name, item in value.items():
            parts.append(name)
            _describe(item, parts)
    elif isinstance(value, slice):
        parts += (slice, value.start, value.stop, value.step)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbol is not described by its value")
    else:
        parts += (type(value), value)


def _prototype(result: Tensor, inputs: list[Tensor]) -> Tensor | None:
    """A tensor like the result, of which `clone` makes more; None where the result is not its own."""
    storage = result.untyped_storage()._cdata
    if result.device.type != "meta" or any(storage == t.untyped_storage()._cdata for t in inputs):
        return None
    like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    if result.requires_grad:
        like.requires_grad_()
    return like if type(result) is Tensor and like.clone().stride() == result.stride() else None
