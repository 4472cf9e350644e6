"""Indexing without a data-free kernel: by a mask, and by an integer tensor without dims.

How many elements a mask picks depends on data. If the mask is known, data-free indices of the right number replace it
in the data-free run of `x[mask]` and `x[mask] = y`; in a leaf's trial run their number is a guess. Which element a 0-d
tensor picks does not affect any shape: 0 replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_MASKS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def indexed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Index; uint8 masks, which torch still accepts but its data-free kernels do not, are converted to bool."""
    index = args[1] if len(args) > 1 else None
    parts = index if type(index) is tuple else (index,)
    if any(isinstance(part, Tensor) and part.dtype == torch.uint8 and part.ndim for part in parts):
        with recorder.on():
            shown = tuple(
                part != 0 if isinstance(part, Tensor) and part.dtype == torch.uint8 else part for part in parts
            )
            return func(args[0], shown if type(index) is tuple else shown[0], *args[2:])
    if recorder.initialises(func, args, kwargs):
        return func(*args, **kwargs)
    return recorder.record(func, *args, **kwargs)


def masks_in(args: tuple[Any, ...]) -> list[Tensor]:
    """The masks in the index of a call; `args` are those of `__getitem__` or `__setitem__`."""
    return [part for part in _parts(args[1]) if _is_mask(part)]


def with_indices(args: tuple[Any, ...], count: Callable[[Tensor], int]) -> tuple[Any, ...]:
    """The same call with each mask replaced by data-free indices: one tensor of `count(mask)` indices for each dim."""
    parts: list[Any] = []
    for part in _parts(args[1]):
        if _is_mask(part):
            parts += [torch.empty(count(part), dtype=torch.int64, device="meta") for _ in range(part.ndim)]
        else:
            parts.append(part)
    return (args[0], tuple(parts), *args[2:])


def single_indices(args: tuple[Any, ...]) -> list[Tensor]:
    """The integer tensors without dims in an index: `self.queue[self.step % 4] = x`."""
    return [part for part in _parts(args[1]) if _is_single(part)]


def at_zero(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same call with 0 in place of each such tensor; torch treats both alike, as a view without the dim."""
    parts = tuple(0 if _is_single(part) else part for part in _parts(args[1]))
    return (args[0], parts, *args[2:])


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in _MASKS


def _is_single(part: Any) -> bool:
    return isinstance(part, Tensor) and not part.ndim and part.dtype in _INTEGERS
