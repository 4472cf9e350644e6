"""What a checkpoint holds, and in which of its files.

- the files of `torch.distributed.checkpoint`: the model's state dict under "model", tensors of the optimizer's state
  under "optimizer", sharded tensors of `extra_state` under "extra", in parts that any mesh can read;
- `optimizer.pt`: the rest of the optimizer's state (groups and their values), of rank 0;
- `rank-00000.pt`, one for each rank: its random states and the rest of `extra_state`, which differ between ranks;
- `plan.json`, where the model is planned, and the marker (see `folders`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.plans import Plan
from autopar.runtime.stored.model_class import ATTRIBUTE

OPTIMIZER_FILE = "optimizer.pt"
_ORDER = (
    "the arguments are the model, its optimizer (None where there is none, or a list of several) and the checkpoint's "
    "place, in this order"
)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` was given, so that names are the same with and without compiling.

    Raises InputError for anything else than a model, which may be an argument in the wrong position.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise InputError(f"the model of a checkpoint is of {type(model).__name__}: {_ORDER}")
    return inner


def optimizers_of(optimizer: Any) -> Sequence[Optimizer]:
    """One optimizer or several as a sequence; raises InputError for anything else, as above."""
    if optimizer is None:
        return ()
    alone = hasattr(optimizer, "param_groups") or isinstance(optimizer, (str, nn.Module))
    several = tuple(optimizer) if isinstance(optimizer, Iterable) and not alone else (optimizer,)
    if others := [type(candidate).__name__ for candidate in several if not hasattr(candidate, "param_groups")]:
        raise InputError(f"the optimizer of a checkpoint is of {others[0]}: {_ORDER}")
    return several


def plan_of(model: nn.Module) -> Plan | None:
    """The model's first plan; None if it is not planned."""
    planned = getattr(model, ATTRIBUTE, None)
    return planned.programs.first.plan if planned is not None else None


def check_between_steps(model: nn.Module) -> None:
    """Raise InputError while gradients wait for later micro-batches, as a checkpoint does not hold them."""
    planned = getattr(model, ATTRIBUTE, None)
    waiting = planned.accumulation.waiting if planned is not None else 0
    if waiting:
        raise InputError(
            f"gradients of {waiting} parameters are accumulated and not applied yet, and a checkpoint holds no "
            "gradients: save after optimizer.step()"
        )


def packed(name: str, value: Any) -> bytes:
    """A value as a file; raises InputError unless it can be read again without running code from the file."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # whatever a user's class raises
        raise InputError(
            f"{name} cannot be kept in a checkpoint: give it as tensors, numbers, strings, lists and dicts "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    return file.getvalue()


def unpacked(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")
