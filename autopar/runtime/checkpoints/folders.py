"""A folder of checkpoints on disk, in which a crash at any moment leaves the last complete one usable.

    folder/step-00000100/           complete: it has a marker, and every file that the marker lists
    folder/.step-00000200.partial/  being written, or left by a crash

A checkpoint is written under its second name: all data, fsynced, then the marker, fsynced. One `rename`, which is
atomic (POSIX), gives it its first name. A checkpoint to delete is first renamed to a hidden name. Leftovers are removed
by the next save. Rank 0 does all of this, on a filesystem that all ranks see.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import InputError
from autopar.plans import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MARKER, PLAN = "checkpoint.json", "plan.json"
FORMAT = 1  # version of the layout of a checkpoint's folder
_COMPLETE = re.compile(r"step-\d{8,}(\.replaced)?")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|deleted)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its path, the step after which it was saved, and by how many ranks.

    `sequence` counts the saves into a folder: the latest checkpoint is the one saved last, which need not be that of
    the highest step (training may have gone back to an earlier one).
    """

    path: Path
    step: int
    ranks: int
    sequence: int

    @property
    def plan(self) -> Plan | None:
        """The plan that it was saved under; None where the model was not planned."""
        path = self.path / PLAN
        return Plan.load(path) if path.exists() else None

    def plan_for(self, device_mesh: DeviceMesh) -> Plan | None:
        """Its plan where that is one for this mesh, so that resuming needs no planning and repeats every bit.

        None (plan anew) where the mesh has another shape or the model was not planned. Leave it out where the model's
        code or the shapes of its inputs have changed since: `autoparallelize` refuses a plan of another graph.
        """
        plan = self.plan
        return plan if plan is not None and tuple(plan.mesh_shape) == tuple(device_mesh.shape) else None


def read_checkpoint(path: Path, *, check_files: bool = True) -> Checkpoint:
    """The checkpoint at `path`; raises InputError if there is none, or if it is not complete.

    `check_files`: also check that all its files (several for each rank that saved) exist and have their full size.
    """
    try:
        marker = json.loads((path / MARKER).read_text())
        checkpoint = Checkpoint(path, int(marker["step"]), int(marker["ranks"]), int(marker["sequence"]))
        files, version = dict(marker["files"]), marker["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no complete checkpoint ({error}): `latest_checkpoint(folder)` finds one"
        ) from error
    if version != FORMAT:
        raise InputError(f"{path} has checkpoint format {version}; this autopar reads {FORMAT}")
    for name, size_bytes in files.items() if check_files else ():
        file = path / name
        size_found = file.stat().st_size if file.is_file() else None
        if size_found != size_bytes:
            state = "is missing" if size_found is None else f"has {size_found} bytes of {size_bytes}"
            raise InputError(f"{path} is no complete checkpoint ({name} {state}): was it copied in part?")
    return checkpoint


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """All complete checkpoints of a folder, the one saved last first; damaged ones are skipped."""
    return sorted(_complete(folder), key=lambda checkpoint: checkpoint.sequence, reverse=True)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; leftovers of crashes are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry)
    partial = folder / f".{_name(step)}.partial"
    partial.mkdir()
    return partial


def check_seen(partial: Path) -> None:
    """Raise InputError if this rank does not see the folder that rank 0 has made."""
    if not partial.is_dir():
        raise InputError(
            f"{partial}, which rank 0 has made, is not there for this rank: checkpoints need a folder on a filesystem "
            "that all machines see"
        )


def complete(partial: Path, step: int, ranks: int, keep: int | None) -> Path:
    """Mark the checkpoint in `partial` as complete and rename it; then delete all but the last `keep` checkpoints."""
    folder = partial.parent
    files = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
    sequence = 1 + max((checkpoint.sequence for checkpoint in _complete(folder)), default=0)
    marker = {"format": FORMAT, "step": step, "ranks": ranks, "sequence": sequence, "files": files}
    write_synced(partial / MARKER, json.dumps(marker, indent=1).encode())
    sync_folder(partial)
    final = folder / _name(step)
    replaced = folder / f"{final.name}.replaced"
    if final.exists():  # training went back to an earlier step: the old one counts until the new one is in place
        _delete(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync_folder(folder)
    _delete(replaced)
    if keep is not None:
        for old in complete_checkpoints(folder)[keep:]:
            _delete(old.path)
    return final


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(folder: Path) -> Iterator[Checkpoint]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if _COMPLETE.fullmatch(entry.name):
            try:
                yield read_checkpoint(entry)
            except InputError:
                continue


def _delete(path: Path) -> None:
    """Remove a checkpoint; one that is removed in part no longer has a checkpoint's name."""
    if path.exists():
        doomed = path.with_name(f".{path.name.removesuffix('.replaced')}.deleted")
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _name(step: int) -> str:
    return f"step-{step:08d}"
