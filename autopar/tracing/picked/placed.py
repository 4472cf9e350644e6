"""Picked rows as indices: `y[:, mask] = x[:, mask]`, `y[mask, classes[mask]] = 1`, `y[kept] = v`, sums by index.

In sums, rows that are not picked are added as zeros; in writes, they go to an extra row at the end, which is cut off.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.tracing.picked.across import located
from autopar.tracing.picked.harmless import given
from autopar.tracing.picked.picked import Picked, is_plain, masked
from autopar.tracing.picked.picks import Picks
from autopar.tracing.picked.views import narrower
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_WHOLE = slice(None)
_ADDING = {"index_add": "source", "scatter_add": "src"}


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sums or the written tensor (None for `__setitem__`); NotImplemented for any other call."""
    first = args[0] if args else None
    if func is Tensor.__setitem__ and is_plain(first):
        return _written(picks, first, args[1], args[2])
    name = plain_name(func)
    in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
    if name == "bincount":
        return _counted(picks, *args, **kwargs)
    if not is_plain(first):
        return NotImplemented
    if name in _ADDING:
        return _added(picks, func, _ADDING[name], args, kwargs)
    if name == "masked_scatter" and len(args) == 3 and not kwargs:
        return _in_order(picks, func, *args)
    if name in ("scatter", "scatter_reduce"):
        return _scattered(picks, name, in_place, args, kwargs)
    return NotImplemented


def _added(picks: Picks, func: Any, key: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`index_add` or `scatter_add` of picked rows at picked indices."""
    named = dict(zip(("self", "dim", "index", key), args, strict=False)) | kwargs
    index, source, dim = named.get("index"), named.get(key), named.get("dim")
    if not isinstance(index, Picked) or not isinstance(source, Picked) or type(dim) is not int or len(named) > 4:
        return NotImplemented
    rank = source.values.ndim
    along = dim % rank == source.at and (index.at == source.at if index.values.ndim == rank else index.values.ndim == 1)
    if index.pick is not source.pick or not along or named["self"].ndim != rank:
        return NotImplemented
    places, added = masked(index, 0), masked(source, 0)
    with picks.recorder.on():
        return func(named["self"], dim, places, added)


def _in_order(picks: Picks, func: Any, target: Tensor, mask: Any, rows: Any) -> Any:
    """`masked_scatter` of rows that the same mask has picked: each returns to its own place."""
    if isinstance(mask, Picked) or not isinstance(rows, Picked) or rows.at:
        return NotImplemented
    with picks.recorder.on():
        shown = mask if mask.shape == target.shape else mask.expand(target.shape)
        pick: Any = picks.of(shown)
        if rows.values.ndim > 1:
            pick = narrower(picks, pick, math.prod(rows.values.shape[1:]))
        if pick is not rows.pick:
            return NotImplemented
        made = torch.where(shown, rows.values.reshape(target.shape).to(target.dtype), target)
        return target.copy_(made) if func is Tensor.masked_scatter_ else made


def _counted(picks: Picks, values: Any, weights: Any = None, minlength: int = 0) -> Any:
    """`bincount` of picked values."""
    if not isinstance(values, Picked) or (weights is not None and not isinstance(weights, Picked)):
        return NotImplemented
    if weights is not None and weights.pick is not values.pick:
        return NotImplemented
    places = masked(values, 0)
    each = masked(weights, 0) if weights is not None else None
    with picks.recorder.on():
        counts = torch.bincount(places, values.pick.rows.double() if each is None else each, minlength)
        return counts.long() if each is None else counts


def _scattered(picks: Picks, name: str, in_place: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    """`scatter` or `scatter_reduce` at picked indices."""
    names = ("self", "dim", "index", "value" if "value" in kwargs else "src", "reduce")
    named = dict(zip(names, args, strict=False)) | kwargs
    target, dim, index = named.pop("self"), named.pop("dim", None), named.pop("index", None)
    key = "value" if "value" in named else "src"
    source = named.pop(key, None)
    if not isinstance(index, Picked) or type(dim) is not int or index.values.ndim != target.ndim:
        return NotImplemented
    is_alike = isinstance(source, Picked) and source.pick is index.pick and source.at == index.at
    if dim % target.ndim != index.at or not (is_alike or isinstance(source, (int, float))):
        return NotImplemented
    shown = given("matmul", source) if isinstance(source, Picked) else source
    with picks.recorder.on():
        size = target.shape[dim]
        padded = torch.cat([target, torch.zeros_like(target.narrow(dim, 0, 1))], dim)
        made = getattr(Tensor, name)(padded, dim, masked(index, size), shown, **named).narrow(dim, 0, size)
        return target.copy_(made) if in_place else made


def _written(picks: Picks, target: Tensor, index: Any, value: Any) -> Any:
    """`target[index] = value`, where picked rows are in the index."""
    parts = index if isinstance(index, tuple) else (index,)
    while len(parts) > 1 and isinstance(parts[-1], slice) and parts[-1] == _WHOLE:
        parts = parts[:-1]
    met = [one for one in parts if isinstance(one, Picked)]
    masks = [n for n, one in enumerate(parts) if is_plain(one) and one.dtype == torch.bool and one.ndim]
    if not met:
        return _masked_at(picks, target, parts, masks[0], value) if len(masks) == 1 else NotImplemented
    column = met[-1]
    pick, rank = column.pick, column.pick.mask.ndim
    if any(one.pick is not pick or one.at for one in met) or not _is_value(value, pick, target.ndim - len(parts)):
        return NotImplemented
    held = parts[0] if masks == [0] else None
    by_mask = len(parts) == 2 and held is not None and picks.of(held) is pick
    by_places = [one.places for one in met[:-1]] == list(range(rank)) and len(parts) == len(met) == rank + 1
    if (by_mask or by_places) and target.ndim == rank + 1 and target.shape[:rank] == pick.mask.shape:
        return _into_columns(picks, target, column, value)
    if len(parts) == 1 and column.values.ndim == 1 and not column.values.is_floating_point():
        return _into_rows(picks, target, column, value)
    return NotImplemented


def _is_value(value: Any, pick: Any, beside: int) -> bool:
    if isinstance(value, Picked):
        return value.pick is pick and not value.at and value.values.ndim <= beside + 1
    return not is_plain(value) or value.ndim <= max(beside, 0)


def _masked_at(picks: Picks, target: Tensor, parts: Any, place: int, value: Any) -> Any:
    """`y[:, mask] = rows`, where the rows lie along the same dim."""
    found = located(target, parts, place)
    if found is None or not isinstance(value, Picked):
        return NotImplemented
    at, basic = found
    mask, pick = parts[place], picks.of(parts[place])
    with picks.recorder.on():
        shown = target if basic is None else target[basic]
        if value.pick is not pick or value.at != at or value.values.ndim != shown.ndim - mask.ndim + 1:
            return NotImplemented
        rows = value.values.unflatten(at, mask.shape) if mask.ndim > 1 else value.values
        beside = shown.ndim - at - mask.ndim
        shown.copy_(torch.where(mask[(..., *[None] * beside)] if beside else mask, rows.to(target.dtype), shown))
    return None


def _into_columns(picks: Picks, target: Tensor, column: Picked, value: Any) -> None:
    """`y[mask, classes] = 1`: one element of each row."""
    pick = column.pick
    with picks.recorder.on():
        length = target.shape[-1]
        number = given("gather", column)
        number = torch.where(number < 0, number + length, number)
        is_there = pick.rows[:, None] & (torch.arange(length, device=number.device) == number[:, None])
        shown = value
        if isinstance(value, Picked):
            shown = value.values.to(target.dtype)[:, None] if value.values.ndim else value.values
        rows = torch.where(is_there, shown, target.flatten(0, -2))
        target.copy_(rows.reshape(target.shape))


def _into_rows(picks: Picks, target: Tensor, places: Picked, value: Any) -> None:
    """`y[places] = v`: whole rows at given indices."""
    with picks.recorder.on():
        size = target.shape[0]
        number = masked(places, size)
        number = torch.where(number < 0, number + size, number)
        shown = given("matmul", value) if isinstance(value, Picked) else value
        padded = torch.cat([target, torch.zeros_like(target[:1])])
        padded[number] = shown.to(target.dtype) if is_plain(shown) else shown
        target.copy_(padded[:size])
