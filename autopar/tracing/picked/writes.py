"""Writes to the place where rows were picked (`x[mask] = y[mask]`, `x[mask] += 1`), and writes into picked rows."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph import storage_of
from autopar.tracing.picked.harmless import IN_PLACE, given, holding, meaning
from autopar.tracing.picked.picked import FILLED, FINITE, HARMLESS, Picked, all_in, is_plain, masked
from autopar.tracing.picked.picks import Picks
from autopar.tracing.picked.rows import fit, narrowed
from autopar.tracing.pointwise import is_pointwise
from autopar.tracing.targets import writes_its_first

Tensor = torch.Tensor


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The written tensor (None for `__setitem__`), with the write in the graph; NotImplemented for any other call."""
    if func is Tensor.__setitem__ and isinstance(args[0], Picked):
        return _set(picks, *args)
    if isinstance(args[0] if args else None, Picked) and (func.__name__ in IN_PLACE or writes_its_first(func)):
        return changed(picks, func, args, kwargs) if fit(all_in((args, kwargs)), args, kwargs) else NotImplemented
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
            if value.pick is not pick or value.at or value.values.ndim != 1 + len(rest):
                return NotImplemented
            value = value.values.reshape((*mask.shape, *value.values.shape[1:])).to(written.dtype)
        elif is_plain(value) and value.ndim > len(rest):
            return NotImplemented
        shown = mask[(..., *[None] * len(rest))] if rest else mask
        written.copy_(torch.where(shown, value, written))
    return None


def changed(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In-place pointwise ops on picked rows: `rows += 1`, `rows.mul_(v)`. All rows are written."""
    rows, others = args[0], args[1:]
    name = meaning(func, args)
    met = all_in((args, kwargs))
    least = FINITE if holding(name, met) == FINITE else FILLED  # old values stay in the autograd graph
    is_like = rows.values.ndim == max(one.values.ndim for one in met)
    is_finite = rows.holds >= least or (least == FINITE and not rows.values.is_floating_point())
    if any(one.pick is not rows.pick for one in met) or not is_pointwise(name):
        return NotImplemented
    if not is_like or storage_of(rows.values) in picks.laid:
        return NotImplemented
    if not is_finite:
        filled = masked(rows, HARMLESS if rows.values.is_floating_point() else 1)
        with picks.recorder.on():
            rows.values.copy_(filled)
    shown, named = given(name, (others, kwargs))
    with picks.recorder.on():
        func(rows.values, *shown, **named)
    rows.written(holding(name, met))
    return rows


def _set(picks: Picks, rows: Picked, index: Any, value: Any) -> Any:
    """`rows[wide] = widths[wide]` with a mask of the rows, and `rows[:, 0] = v`."""
    parts = index if isinstance(index, tuple) else (index,)
    pick, values = rows.pick, rows.values
    if storage_of(values) in picks.laid:
        return NotImplemented
    holds = min(rows.holds, value.holds) if isinstance(value, Picked) else min(rows.holds, FINITE)
    if len(parts) == 1 and isinstance(parts[0], Picked):
        again = parts[0].values
        if parts[0].pick is not pick or again.dtype != torch.bool or again.ndim > values.ndim:
            return NotImplemented
        both, rank = narrowed(pick, again), values.ndim - again.ndim + 1
        with picks.recorder.on():
            if isinstance(value, Picked):
                if value.pick is not picks.of(both) or value.values.ndim != rank:
                    return NotImplemented
                value = value.values.reshape((*both.shape, *value.values.shape[1:])).to(values.dtype)
            elif is_plain(value) and value.ndim >= rank:
                return NotImplemented
            values.copy_(torch.where(both[(..., *[None] * (rank - 1))], value, values))
        rows.written(holds)
        return None
    are_slices = all(isinstance(one, (slice, int)) or one is Ellipsis for one in parts)
    if not are_slices or not (parts[0] is Ellipsis or (isinstance(parts[0], slice) and parts[0] == slice(None))):
        return NotImplemented
    if parts[0] is Ellipsis and len(parts) > values.ndim:
        return NotImplemented
    with picks.recorder.on():
        part = values[parts]
        if isinstance(value, Picked) and (value.pick is not pick or value.values.ndim != part.ndim):
            return NotImplemented
        if is_plain(value) and value.ndim >= part.ndim:
            return NotImplemented
        part.copy_(value.values) if isinstance(value, Picked) else part.copy_(torch.as_tensor(value))
    rows.written(holds)
    return None


def _pick_of(picks: Picks, index: Any) -> Any:
    """The pick of a mask used as an index, or of the indices of a mask's elements."""
    if is_plain(index) and index.dtype == torch.bool and index.ndim:
        return picks.of(index)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, Picked) for part in parts):
        return None
    pick = parts[0].pick
    held = [part.places for part in parts]
    alike = all(part.pick is pick for part in parts) and held == list(range(pick.mask.ndim))
    return pick if alike else None
