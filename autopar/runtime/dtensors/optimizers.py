"""Refuses optimizers that cannot update a planned model's parameters: an error at their first step names another."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError

_OWN = "take autopar.Adafactor, which has the arguments of torch.optim.Adafactor"
_UNFIT = {  # by module and name: whether parameters whole on every rank can be updated, and what to do instead
    ("torch.optim", "Adafactor"): (True, _OWN),
    ("transformers.optimization", "Adafactor"): (False, _OWN),
    ("torch.optim.rprop", "Rprop"): (
        True,
        "take another optimizer, or keep parameters whole by constraints='param:* = R'",
    ),
}


@functools.cache
def refuse_unfit() -> None:
    """From now on, `step()` of these optimizers raises InputError if they cannot update a DTensor; once a process."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    kind = type(optimizer).__module__, type(optimizer).__name__
    if kind not in _UNFIT:
        return
    updates_whole, instead = _UNFIT[kind]
    tensors = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    if any(not updates_whole or any(placement.is_shard() for placement in p.placements) for p in tensors):
        raise InputError(f"{kind[0].partition('.')[0]}'s {kind[1]} cannot update sharded parameters: {instead}")
