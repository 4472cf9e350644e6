"""`load_checkpoint` and `latest_checkpoint`: resume training, under any plan, whichever the checkpoint had."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoints.contents import OPTIMIZER_FILE, optimizers_of, rank_file, uncompiled, unpacked
from autopar.runtime.checkpoints.extra_parts import joined, places
from autopar.runtime.checkpoints.folders import Checkpoint, complete_checkpoints, read_checkpoint
from autopar.runtime.checkpoints.optimizer_states import empty_state, set_state
from autopar.runtime.checkpoints.random_states import set_random_states
from autopar.runtime.checkpoints.saving import finish_running
from autopar.runtime.checkpoints.together import Together
from autopar.runtime.ranks.failures import count_steps_from
from autopar.runtime.stored.parameters import check_values


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """The complete checkpoint in `folder` that was saved last, or None; every rank gets the one that rank 0 finds."""
    finish_running()
    absolute = Path(folder).absolute()
    return Together("latest_checkpoint").first_does(
        "looking for checkpoints", lambda: next(iter(complete_checkpoints(absolute)), None)
    )


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    checkpoint: Checkpoint | str | Path,
    *,
    extra_state: Mapping[str, Any] | None = None,
    random_states: bool = True,
) -> int:
    """Load a checkpoint into `model` and `optimizer` in place, and return its step; called on every rank.

    The model may have any plan and mesh, or be a plain module with the same parameters, on any number of processes.
    Values are the saved ones, bit for bit, cast if the model has another dtype. A model on the meta device needs
    `autopar.materialise(model, draw=False)` first.

    Args:
        optimizer: one or a list, as saved; None: do not load optimizer state (for a model that is only evaluated).
        checkpoint: from `latest_checkpoint`, or a path that ends in `step-…`.
        extra_state: the objects of the saved `extra_state` to load, by name, each with a `load_state_dict`.
        random_states: also restore the random states. On as many ranks as saved it, each rank gets its own; on another
            number, rank r gets that of saved rank r modulo their number. The same holds for `extra_state`.

    Raises, on every rank: InputError, before anything is changed, if the checkpoint is not complete or has other
    parameters, parameter groups, optimizers or `extra_state`; CheckpointError if reading fails midway.
    """
    finish_running()
    together, model = Together("load_checkpoint"), uncompiled(model)
    optimizers, extra = optimizers_of(optimizer), extra_state or {}
    path = checkpoint.path if isinstance(checkpoint, Checkpoint) else Path(checkpoint).absolute()

    def prepare() -> tuple[Checkpoint, dict[str, Any], dict[str, Any], dict[str, Any]]:
        opened = read_checkpoint(path, check_files=together.is_first)
        check_values(model)
        state: dict[str, Any] = {"model": model.state_dict()}
        _check_names(path, state["model"])
        own = unpacked(path / rank_file(together.rank % opened.ranks))
        if missing := [name for name in extra if name not in own["extra"]]:
            raise InputError(f"{path} has no extra_state {missing}; it has {sorted(own['extra'])}")
        if without := [name for name, value in extra.items() if not hasattr(value, "load_state_dict")]:
            raise InputError(f"extra_state {without} have no load_state_dict")
        state["extra"] = places(path, own["extra"], extra)
        listed: dict[str, Any] = {}
        if optimizers:
            listed = unpacked(path / OPTIMIZER_FILE)
            state["optimizer"] = empty_state(model, optimizers, listed)
        return opened, state, listed, own

    opened, state, listed, own = together.all_do("opening a checkpoint", prepare)
    together.check_same("the checkpoint to load", (str(path), opened.sequence))
    _read(state, path, together)

    def install() -> None:
        model.load_state_dict(state["model"])
        if optimizers:
            set_state(optimizers, state["optimizer"], listed)
        for name, value in extra.items():
            value.load_state_dict(joined(own["extra"][name], state["extra"]))
        if random_states:  # last, since the code above may draw
            set_random_states(model, own["random"])
        count_steps_from(opened.step)

    together.all_do("loading a checkpoint", install)
    return opened.step


def _read(state: dict[str, Any], path: Path, together: Together) -> None:
    """Read into the tensors of `state`, on each rank its own parts."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, and that is meant
        try:
            load(state, checkpoint_id=path, process_group=together.group, no_dist=together.group is None)
        except CheckpointException as error:  # a BaseException, of all ranks' errors
            raise CheckpointError(f"{path} could not be read: {error}") from error


def _check_names(path: Path, state: Mapping[str, Any]) -> None:
    """Raise InputError unless the saved model has the same names with the same shapes."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    saved = {key.removeprefix("model."): entry for key, entry in entries.items() if key.startswith("model.")}
    if missing := [name for name in state if name not in saved]:
        raise InputError(f"{path} lacks {len(missing)} of the model's parameters and buffers: {', '.join(missing[:5])}")
    if unknown := [name for name in saved if name not in state]:
        raise InputError(f"the model lacks {len(unknown)} tensors of {path}: {', '.join(unknown[:5])}")
    for name, value in state.items():
        shape = getattr(saved[name], "size", None)
        if isinstance(value, torch.Tensor) and shape != value.shape:
            raise InputError(f"'{name}' has shape {tuple(value.shape)} here and {tuple(shape or ())} in {path}")
