"""Whole tensors that have as many rows as are picked: `F.cross_entropy(logits[mask], labels)`, `x[mask] + features`.

The k-th row of such a tensor belongs to the k-th picked row. If their numbers differ, which eager mode refuses, the
indices that are read exceed the last row: an error when the model runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.picked.picked import Pick, Picked, all_in, is_plain
from autopar.tracing.picked.picks import Picks
from autopar.tracing.picked.rows import is_elementwise
from autopar.tracing.picked.sums import LOSSES, OF_ROWS
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_BROADCAST = ("weight", "pos_weight")  # arguments of losses that broadcast over rows


def call(picks: Picks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with such tensors replaced by picked rows; NotImplemented if there are none."""
    met, name = all_in((args, kwargs)), plain_name(func)
    pick, rank = met[0].pick, max(one.values.ndim for one in met)
    if any(one.pick is not pick or one.at for one in met) or not (func in LOSSES or is_elementwise(name, args, kwargs)):
        return NotImplemented
    least = 1 if func in OF_ROWS else rank

    def is_as_many(one: Any) -> bool:
        return is_plain(one) and least <= one.ndim <= rank and one.shape[0] != 1

    fixed = {key: value for key, value in kwargs.items() if key in _BROADCAST}
    others = {key: value for key, value in kwargs.items() if key not in _BROADCAST}
    if func in LOSSES and any(is_plain(one) for one in args[2:]):
        return NotImplemented
    if not any(is_as_many(one) for one in pytree.tree_leaves((args, others))):
        return NotImplemented
    args, others = pytree.tree_map(lambda one: _rows(picks, pick, one) if is_as_many(one) else one, (args, others))
    return picks.call(func, args, {**others, **fixed})


def _rows(picks: Picks, pick: Pick, values: Tensor) -> Picked:
    """The rows of a whole tensor, each placed at the row that it belongs to."""
    count = values.shape[0]
    with picks.recorder.on():
        place = (pick.rows.cumsum(0) - 1).masked_fill(pick.other_rows, 0)
        place = torch.where(pick.count == count, place, count)
        return Picked(pick, values[place])
