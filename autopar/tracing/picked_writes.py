"""Picked rows that are written where they were picked, `x[mask] = y[mask]`, `x[mask] += 1`, or are written into."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph import storage_of
from autopar.tracing.picked import FILLED, FINITE, Picked, Picks, all_in, is_plain
from autopar.tracing.picked_harmless import IN_PLACE, given, holding, meaning
from autopar.tracing.picked_rows import fit
from autopar.tracing.pointwise import is_pointwise
from autopar.tracing.targets import writes_its_first

Tensor = torch.Tensor


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """None, or what is written into, once the write is in the graph; NotImplemented for anything else."""
    if isinstance(args[0] if args else None, Picked) and (func.__name__ in IN_PLACE or writes_its_first(func)):
        return _changed(picks, func, args, kwargs)
    if func is not Tensor.__setitem__ or not is_plain(args[0]):
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


def _changed(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows that are written into, those that are not picked too: `rows += 1`, `rows.mul_(v)`."""
    rows, others = args[0], args[1:]
    name = meaning(func, args)
    met = all_in((args, kwargs))
    least = FINITE if holding(name, met) == FINITE else FILLED  # what they hold stays in the graph of gradients
    is_like = rows.values.ndim == max(one.values.ndim for one in met)
    is_finite = rows.holds >= least or (least == FINITE and not rows.values.is_floating_point())
    if any(one.pick is not rows.pick for one in met) or not is_pointwise(name) or not fit(met, args, kwargs):
        return NotImplemented
    if not is_like or not is_finite or storage_of(rows.values) in picks.laid:
        return NotImplemented
    shown, named = given(name, (others, kwargs))
    with picks.recorder.on():
        func(rows.values, *shown, **named)
    rows.written(holding(name, met))
    return rows


def _pick_of(picks: Picks, index: Any) -> Any:
    """The mask that an index is, or whose places it holds."""
    if is_plain(index) and index.dtype == torch.bool and index.ndim:
        return picks.of(index)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, Picked) for part in parts):
        return None
    pick = parts[0].pick
    held = [part.places for part in parts]
    alike = all(part.pick is pick for part in parts) and held == list(range(pick.mask.ndim))
    return pick if alike else None
