"""Tensors that are created with as many rows as a mask picks: `torch.ones(rows.shape[0])`,
`torch.arange(len(rows))`."""

from __future__ import annotations

from typing import Any

import torch

from autopar.tracing.picked.picked import FILLED, ROW, Pick, Picked
from autopar.tracing.picked.picks import Picks

Tensor = torch.Tensor
_OF_SIZES = {torch.ones: 0, torch.zeros: 0, torch.empty: 0, torch.full: 0} | {
    getattr(Tensor, name): 1 for name in ("new_ones", "new_zeros", "new_empty", "new_full")
}


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As many rows as are picked, if the first size is their number; NotImplemented for any other call."""
    if func is torch.arange:
        return _places(picks, *args, **kwargs)
    if func not in _OF_SIZES:
        return NotImplemented
    before, sizes = args[: _OF_SIZES[func]], args[_OF_SIZES[func] :]
    behind: tuple[Any, ...] = ()
    if sizes and isinstance(sizes[0], (tuple, list)):
        sizes, behind = tuple(sizes[0]), sizes[1:]
    elif not sizes and isinstance(kwargs.get("size"), (tuple, list)):
        sizes, kwargs = tuple(kwargs["size"]), {key: value for key, value in kwargs.items() if key != "size"}
    pick = _counted(picks, sizes[0] if sizes else None)
    if pick is None:
        return NotImplemented
    with picks.recorder.on():
        return Picked(pick, func(*before, (pick.rows.shape[0], *sizes[1:]), *behind, **kwargs), holds=FILLED)


def _counted(picks: Picks, number: Any) -> Pick | None:
    """The pick whose number of rows this is."""
    return next((pick for pick in picks.made if pick.counted is not None and pick.counted is number), None)


def _places(picks: Picks, *ends: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """The index of each row among the picked ones."""
    ends = ends or (kwargs.pop("end", None),)
    from_zero = len(ends) == 1 or (len(ends) == 2 and type(ends[0]) is int and ends[0] == 0)
    pick = _counted(picks, ends[-1]) if from_zero else None
    if pick is None or kwargs.keys() - {"device"}:
        return NotImplemented
    with picks.recorder.on():
        numbers = (pick.rows.cumsum(0) - 1).clamp(min=0)
        return Picked(pick, numbers if dtype is None else numbers.to(dtype), places=ROW)
