"""A planned model's weights as files of safetensors that anything reads: whole tensors, under the user's own names."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputError
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.meeting import meet
from autopar.runtime.stored.model_class import ATTRIBUTE
from autopar.runtime.stored.parameters import check_values
from autopar.runtime.weights.gathering import whole_on_rank_zero
from autopar.runtime.weights.loading import stored_tensors, tied_groups
from autopar.sizes import parse_bytes


@dataclass(frozen=True)
class _File:
    """One file to write: its name, and for each tensor the name that it is stored under."""

    name: str
    tensors: dict[str, torch.Tensor]


def export_full_state(
    model: nn.Module, path: str | Path, *, largest_file: int | str = "5GB", dtype: torch.dtype | None = None
) -> list[Path]:
    """Write parameters and persistent buffers to safetensors; called on every rank, rank 0 writes.

    `path`: a folder, in which `model.safetensors` is written, or a file `NAME.safetensors`. More than `largest_file`
    bytes are split into several files with an index, as transformers reads them. In addition to its shards, rank 0
    holds the tensors of one file at a time, other ranks none. A tied tensor is stored under one of its names. For a
    model of transformers the config is written too, so that `from_pretrained` reads the folder. `dtype`: floating
    tensors are cast to it; None: as they are stored. A model without a plan can be written too.

    Files are first written under temporary names, and renamed when all are complete, the index last. Returns their
    paths.

    Raises InputError, on every rank, for a model on the meta device or with complex128 tensors, or if files cannot be
    written.
    """
    folder, stem = _place(Path(path))
    planned = getattr(model, ATTRIBUTE, None)
    device = planned.rank.device if planned is not None else torch.device("cpu")
    together = planned is not None and dist.is_initialized()
    if together:
        meet("export_full_state")
    writes = not dist.is_initialized() or dist.get_rank() == 0
    error: Exception | None = None
    files: list[_File] = []
    kept_for: dict[str, str] = {}
    try:
        check_values(model)
        kept_for = _dropped(model)
        files = _files(model, stem, kept_for, parse_bytes(largest_file), dtype)
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
    except Exception as problem:  # every rank must learn of it before any of them goes on
        error = _as_input_error(problem, folder)
    for file in files:
        _settle(device, together, error)
        content = {name: whole for name, whole in _gathered(file, dtype) if whole is not None}
        try:
            if writes:
                _write(folder / _partial_name(file.name), content, kept_for)
        except Exception as problem:
            error = _as_input_error(problem, folder)
        content.clear()  # before the next file's
    _settle(device, together, error)
    try:
        if writes:
            _put_in_place(folder, stem, files)
            _write_config(model, planned, folder, dtype)
    except Exception as problem:
        error = _as_input_error(problem, folder)
    _settle(device, together, error)
    return [folder / file.name for file in files]


def _settle(device: torch.device, together: bool, error: Exception | None) -> None:
    """Go on only if no rank failed."""
    if together:
        agree(device, {}, error)
    elif error is not None:
        raise error


def _as_input_error(problem: Exception, folder: Path) -> Exception:
    return InputError(f"cannot write to {folder}: {problem}") if isinstance(problem, OSError) else problem


def _place(path: Path) -> tuple[Path, str]:
    """The folder, and the stem of the files' names."""
    return (path.parent, path.stem) if path.suffix == ".safetensors" else (path, "model")


def _dropped(model: nn.Module) -> dict[str, str]:
    """Maps each name under which a tied tensor is not stored to the name under which it is.

    transformers lists the names to leave out (`all_tied_weights_keys`); otherwise the first name is kept.
    """
    away = getattr(model, "all_tied_weights_keys", None) or {}
    stored_under = {}
    for names in tied_groups(stored_tensors(model)):
        stored_name = next((name for name in names if name not in away), names[0])
        stored_under.update({name: stored_name for name in names if name != stored_name})
    return stored_under


def _files(
    model: nn.Module, stem: str, dropped: dict[str, str], largest_bytes: int, dtype: torch.dtype | None
) -> list[_File]:
    """Tensors in order, assigned to files; a tensor larger than `largest_bytes` has a file of its own."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    filled_bytes = 0
    for name, tensor in stored_tensors(model).items():
        if name in dropped:
            continue
        if tensor.is_complex() and tensor.dtype != torch.complex64:
            raise InputError(
                f"'{name}' has the dtype {tensor.dtype}, which safetensors does not have: keep the weights with "
                "save_checkpoint instead, or build the model with complex64"
            )
        size_bytes = tensor.numel() * _cast(tensor, dtype).itemsize
        if groups[-1] and filled_bytes + size_bytes > largest_bytes:
            groups.append({})
            filled_bytes = 0
        groups[-1][name] = tensor
        filled_bytes += size_bytes
    if len(groups) == 1:
        return [_File(f"{stem}.safetensors", groups[0])]
    count = len(groups)
    return [_File(f"{stem}-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@torch.no_grad()
def _gathered(file: _File, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each tensor, whole on rank 0, one after the other."""
    for name, tensor in file.tensors.items():
        whole = whole_on_rank_zero(tensor.detach().to(_cast(tensor, dtype)))
        yield name, whole.contiguous() if whole is not None else None


def _partial_name(name: str) -> str:
    return f"{name}.partial"


def _write(path: Path, content: dict[str, torch.Tensor], kept_for: dict[str, str]) -> None:
    from safetensors.torch import save_file

    save_file(content, path, metadata={"format": "pt", **{k: v for k, v in kept_for.items() if v in content}})


def _put_in_place(folder: Path, stem: str, files: Sequence[_File]) -> None:
    """Give complete files their final names, and remove files left by an export to another number of files."""
    index = folder / f"{stem}.safetensors.index.json"
    index.unlink(missing_ok=True)  # no index stands beside files that it does not describe
    for file in files:
        os.replace(folder / _partial_name(file.name), folder / file.name)
    names = {file.name for file in files}
    for old in (folder / f"{stem}.safetensors", *folder.glob(f"{stem}-?????-of-?????.safetensors")):
        if old.name not in names:
            old.unlink(missing_ok=True)
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.tensors}
        size_bytes = sum((folder / file.name).stat().st_size for file in files)
        partial_index = folder / _partial_name(index.name)
        partial_index.write_text(
            json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": weight_map}, indent=2)
        )
        os.replace(partial_index, index)


def _write_config(model: nn.Module, planned: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write what transformers' `from_pretrained` needs beside the weights."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(type(model), "base_model_prefix"):
        return
    config = copy.deepcopy(config)
    config.architectures = [(planned.user_class if planned is not None else type(model)).__name__]
    floats = {_cast(p, dtype) for p in model.parameters() if p.is_floating_point()}
    if len(floats) == 1:
        config.dtype = floats.pop()
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
