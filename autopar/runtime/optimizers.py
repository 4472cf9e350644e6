"""Optimizers that cannot update what planned models have: told at their first step, with what to take instead."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError

_UNFIT = {  # by module and name: whether parameters that are whole on every rank are updated
    ("torch.optim", "Adafactor"): True,
    ("transformers.optimization", "Adafactor"): False,
}


@functools.cache
def refuse_unfit() -> None:
    """From now on `step()` of these raises InputError where parameters are DTensors; once a process."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    kind = type(optimizer).__module__, type(optimizer).__name__
    if kind not in _UNFIT:
        return
    tensors = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    if any(not _UNFIT[kind] or any(placement.is_shard() for placement in p.placements) for p in tensors):
        raise InputError(
            f"{kind[0].partition('.')[0]}'s Adafactor cannot update sharded parameters: take autopar.Adafactor, which "
            "has the arguments of torch.optim.Adafactor"
        )
