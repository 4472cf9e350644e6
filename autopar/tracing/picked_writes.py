"""Picked rows that are written where they were picked: `x[mask] = y[mask]`, `x[mask] += 1`."""

from __future__ import annotations

from typing import Any

import torch

from autopar.tracing.picked import Picked, Picks

Tensor = torch.Tensor


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None, once the write is in the graph; NotImplemented for anything else."""
    if func is not Tensor.__setitem__ or not isinstance(args[0], Tensor):
        return NotImplemented
    written, index, value = args
    pick = _pick_of(picks, index)
    if pick is None or written.shape[: pick.mask.ndim] != pick.mask.shape:
        return NotImplemented
    mask = pick.mask
    rest = written.shape[mask.ndim :]
    with picks.recorder.on():
        if isinstance(value, Picked):
            if value.pick is not pick or value.values.ndim != 1 + len(rest):
                return NotImplemented
            value = value.values.reshape((*mask.shape, *value.values.shape[1:])).to(written.dtype)
        elif isinstance(value, Tensor) and value.ndim > len(rest):
            return NotImplemented
        shown = mask[(..., *[None] * len(rest))] if rest else mask
        written.copy_(torch.where(shown, value, written))
    return None


def _pick_of(picks: Picks, index: Any) -> Any:
    """The mask that an index is, or whose places it holds."""
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim:
        return picks.of(index)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, Picked) for part in parts):
        return None
    pick = parts[0].pick
    held = [part.places for part in parts]
    alike = all(part.pick is pick for part in parts) and held == list(range(pick.mask.ndim))
    return pick if alike else None
