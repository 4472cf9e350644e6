"""Autocast regions: the implicit casts of autocast are written into the graph.

Autocast is tied to a device and does not affect data-free tensors. So the first time a function is called with certain
dtypes in a region, it runs on fake CPU tensors, which are affected; its inputs are then cast to the dtype that gives
the same result dtypes without autocast. The graph needs no region.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tensor = torch.Tensor


class Autocast:
    """The dtype to which autocast casts a function's inputs, by function and input dtypes."""

    def __init__(self) -> None:
        self._seen: dict[Any, torch.dtype | None] = {}

    def input_dtype(self, kind: str, func: Callable[..., Any], args: Any, kwargs: Any) -> torch.dtype | None:
        """The dtype that floating inputs are cast to under autocast of device type `kind`; None for no cast."""
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        dtype = torch.get_autocast_dtype(kind)
        if not any(_is_cast(t) for t in tensors) or getattr(func, "__name__", "") in ("to", "type", "float", "detach"):
            return None
        key = (func, dtype, tuple((t.dtype, t.ndim) for t in tensors))
        if key not in self._seen:
            self._seen[key] = self._find(kind, dtype, func, args, kwargs)
        return self._seen[key]

    def _find(
        self, kind: str, dtype: torch.dtype, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> torch.dtype | None:
        """The dtype of floating inputs for which the result's dtypes without autocast are those with it."""
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        try:
            autocast_dtypes = _dtypes(_run_fake(func, args, kwargs, dtype))
        except (DataDependentOutputException, DynamicOutputShapeException):  # `x[mask]`: such ops are not cast
            return None
        with disabled(kind):
            return next(
                (c for c in (None, dtype, torch.float32) if _dtypes_with(func, args, kwargs, c) == autocast_dtypes),
                None,
            )


@contextlib.contextmanager
def disabled(kind: str) -> Iterator[None]:
    with torch.autocast(kind, enabled=False):
        yield


def _run_fake(func: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode(), torch.autocast("cpu", dtype):
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"), (args, kwargs)
        )
        return func(*args, **{n: torch.device("cpu") if n == "device" else v for n, v in kwargs.items()})


def _dtypes_with(func: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype | None) -> Any:
    """Dtypes of the results with floating inputs cast to `dtype`; None if the function does not accept these."""
    if dtype is not None:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if _is_cast(t) else t, (args, kwargs))
    try:
        return _dtypes(func(*args, **kwargs))
    except RuntimeError:  # mixed dtypes that only autocast reconciles
        return None


def _dtypes(result: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def _is_cast(tensor: Tensor) -> bool:
    """Whether autocast casts a tensor: it is floating, but not float64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64
