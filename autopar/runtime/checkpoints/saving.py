"""`save_checkpoint`: writes everything that is needed to resume training, at once or in the background."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoints.contents import (
    OPTIMIZER_FILE,
    check_between_steps,
    optimizers_of,
    packed,
    plan_of,
    rank_file,
    uncompiled,
)
from autopar.runtime.checkpoints.extra_parts import parted
from autopar.runtime.checkpoints.folders import PLAN, begin, check_seen, complete, write_synced
from autopar.runtime.checkpoints.optimizer_states import named_state
from autopar.runtime.checkpoints.random_states import random_states
from autopar.runtime.checkpoints.together import Together

_running: Future[Path] | None = None  # the save in the background: one at a time


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    folder: str | Path,
    *,
    step: int,
    extra_state: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Future[Path]:
    """Save model, optimizer, random states, step and plan into `folder/step-…`; called on every rank.

    The model may be planned or not, on any number of ranks; `load_checkpoint` reads it on any other number. Whenever a
    process dies, the last complete checkpoint stays usable. Ranks on several machines need a `folder` on a shared
    filesystem. Use one folder for one run: leftovers of crashes in it are removed.

    Args:
        optimizer: the optimizer of the model, or a list of several.
        step: optimizer steps made so far.
        extra_state: other objects by name, each with a `state_dict` and a `load_state_dict` (schedulers, data loaders,
            gradient scalers, averaged weights), or numbers, strings, tensors, lists and dicts; saved for each rank,
            except sharded tensors (DTensors).
        keep: how many of the last checkpoints stay in the folder; None: all.
        asynchronous: return as soon as everything is copied to CPU memory, and write in the background. The next call
            waits for the one before.

    Returns a future of the checkpoint's path, which with `asynchronous` is done when the checkpoint is complete.
    `result()` raises errors of the writing, and so does the next call; call it before `dist.destroy_process_group()`.

    Raises, on every rank: InputError if the ranks disagree about the step, or if a value cannot be kept in a
    checkpoint; CheckpointError if writing fails.
    """
    global _running
    finish_running()
    if keep is not None and keep < 1:
        raise InputError(f"keep={keep}: at least one checkpoint must stay")
    together = Together("save_checkpoint")
    model, optimizers = uncompiled(model), optimizers_of(optimizer)
    folder = Path(folder).absolute()

    state, files = together.all_do(
        "collecting a checkpoint", lambda: _collected(model, optimizers, extra_state or {}, together)
    )
    together.check_same("the step and the folder of a checkpoint", (step, str(folder)))
    partial = together.first_does("starting a checkpoint", lambda: begin(folder, step))
    together.all_do("looking for the checkpoint's folder", lambda: check_seen(partial))
    if not asynchronous:
        done: Future[Path] = Future()
        _write(state, partial, together)
        done.set_result(_completed(files, partial, step, keep, together))
        return done
    copied = _copy(state)

    def write_and_complete() -> Path:
        _write(copied, partial, together, background=True)
        return _completed(files, partial, step, keep, together)

    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    _running = executor.submit(write_and_complete)
    executor.shutdown(wait=False)
    return _running


def _collected(
    model: nn.Module, optimizers: Sequence[Optimizer], extra_state: Mapping[str, Any], together: Together
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What `torch.distributed.checkpoint` writes, on each rank its shards; and the contents of this rank's own files by
    their names."""
    check_between_steps(model)
    tensors, listed = named_state(model, optimizers)
    plain, parts = parted(extra_state)
    own = {"random": random_states(model), "extra": plain}
    files = {rank_file(together.rank): packed("extra_state", own)}
    if together.is_first:
        files[OPTIMIZER_FILE] = packed("the optimizer's state", listed)
        plan = plan_of(model)
        if plan is not None:
            files[PLAN] = plan.to_json().encode()
    return {"model": model.state_dict(), "optimizer": tensors, "extra": parts}, files


def _completed(files: Mapping[str, bytes], partial: Path, step: int, keep: int | None, together: Together) -> Path:
    """Write this rank's own files, then the marker of a complete checkpoint, which lists the files of all ranks."""

    def write_own() -> None:
        for name, content in files.items():
            write_synced(partial / name, content)

    together.all_do("writing a checkpoint", write_own)
    return together.first_does("completing a checkpoint", lambda: complete(partial, step, together.size, keep))


def finish_running() -> None:
    """Wait for the save in the background, if there is one; raise what went wrong with it."""
    global _running
    running, _running = _running, None
    if running is not None:
        running.result()


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """A copy in CPU memory, as `async_save` makes it."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    copied = stager.stage(state)
    stager.close()
    assert isinstance(copied, dict)
    return copied


def _write(state: dict[str, Any], partial: Path, together: Together, *, background: bool = False) -> None:
    """Write this rank's parts of a state; in the `background`, from copies in CPU memory."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # no copying ahead in a thread: it uses the current GPU, which in a new thread is the node's first, on all ranks
    writer = FileSystemWriter(partial, sync_files=True, per_thread_copy_ahead=0 if background else 10_000_000)
    with warnings.catch_warnings():  # in a thread, too: at worst the filter for this one message stays
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process, and that is meant
        try:
            save(state, storage_writer=writer, process_group=together.group, no_dist=together.group is None)
        except CheckpointException as error:  # a BaseException, of all ranks' errors
            raise CheckpointError(f"{partial} could not be written: {error}") from error
