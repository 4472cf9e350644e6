"""Indexing by a mask: how many elements it picks depends on data.

`x[mask]` and `x[mask] = y` have no kernel without data. Where the mask is known, its indices are, and stand in for it
in the data-free run; a leaf's trial run guesses how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_MASKS = (torch.bool, torch.uint8)


def masks_in(args: tuple[Any, ...]) -> list[Tensor]:
    """The masks in an index: `args` are those of `__getitem__` or `__setitem__`."""
    return [part for part in _parts(args[1]) if _is_mask(part)]


def with_indices(args: tuple[Any, ...], count: Callable[[Tensor], int]) -> tuple[Any, ...]:
    """The same call with `count(mask)` data-free indices a dim in place of each mask."""
    parts: list[Any] = []
    for part in _parts(args[1]):
        if _is_mask(part):
            parts += [torch.empty(count(part), dtype=torch.int64, device="meta") for _ in range(part.ndim)]
        else:
            parts.append(part)
    return (args[0], tuple(parts), *args[2:])


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in _MASKS
