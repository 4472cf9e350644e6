"""Loads weights from safetensors directly into stored tensors: a rank reads only its own part of each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.python.held import Held
from autopar.runtime.planned import Planned
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.meeting import meet
from autopar.runtime.stored.carried import planned_of
from autopar.runtime.stored.parameters import listed
from autopar.runtime.stored.pieces import cut, ranges_of
from autopar.runtime.weights.materialising import set_value, tensor_at
from autopar.runtime.weights.rearranged import Conversion, renamed_and_converted
from autopar.runtime.weights.weight_files import WeightFiles, weight_files
from autopar.user_warnings import warn

_WHOLE_NUMBERS = ("I", "U", "BOOL")  # prefixes of safetensors' names for dtypes that are not floating


def load_weights(model: nn.Module, path: str | Path, *, strict: bool = True) -> int:
    """Read a planned model's weights from safetensors; called on every rank. Returns the bytes that this rank read.

    `path`: a file, a folder, or an index of several files. Names are those of `model.state_dict()`; a tied tensor is
    stored once, under any of its names. Values are cast to the dtype in which the plan stores them. Other forms in
    files of transformers (experts one by one, older names, a model without its head or with one: `base_model_prefix`)
    are converted as by its own `from_pretrained`.
    `strict`: the files must hold all tensors of the model, and no others. If False, missing tensors stay as they are
    (those on the meta device need `materialise`), and a warning lists missing and unused ones. Non-persistent buffers
    on the meta device always need `materialise`.

    Raises InputError, on every rank, for files that cannot be read, for names, shapes or kinds of dtypes that differ
    (before anything is changed), and for tied tensors with several values in the files; PlanMismatchError if ranks see
    different files.
    """
    planned = planned_of(model)
    meet("load_weights")
    device = planned.rank.device
    error: Exception | None = None
    read_bytes, description = 0, ""
    with ExitStack() as stack:
        stack.callback(Held(model).update)
        try:
            files = stack.enter_context(weight_files(path))
            description = repr([(name, stored.shape, stored.dtype) for name, stored in sorted(files.tensors.items())])
            chosen = _chosen(model, files, strict)
        except Exception as problem:  # every rank must learn of it before any of them goes on
            error = problem
        agree(device, {"the files of weights": description}, error)
        try:
            for names, sources in chosen.as_they_are:
                read_bytes += _load(model, planned, names, files, sources)
            for conversion in chosen.converted:
                read_bytes += _convert(model, planned, conversion, files)
        except Exception as problem:
            error = problem
        agree(device, {}, error)
    return read_bytes


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model that belong in a file of weights: parameters and persistent buffers, under all names."""
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}


def tied_groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """All names of each tensor, tensor by tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


@dataclass(frozen=True)
class _Chosen:
    """What to read: for each tensor its names in the model and in the files, and the tensors to compute from others."""

    as_they_are: list[tuple[list[str], list[str]]]
    converted: list[Conversion]


def _chosen(model: nn.Module, files: WeightFiles, strict: bool) -> _Chosen:
    """Match the files' tensors with the model's, and check them."""
    tensors = stored_tensors(model)
    renamed, conversions = renamed_and_converted(model, tensors, files.tensors)
    source = {**renamed, **_sources(model, tensors, files.tensors)}
    conversions = [conversion for conversion in conversions if not all(name in source for name in conversion.yields)]
    converted = {name for conversion in conversions for name in conversion.yields}
    used = {*source.values(), *(name for conversion in conversions for name, _ in conversion.sources)}
    chosen, missing = [], []
    for names in tied_groups(tensors):
        sources = [source[name] for name in names if name in source and name not in converted]
        if sources:
            chosen.append((names, sources))
            _check(names[0], tensors[names[0]], files, sources)
        elif converted.isdisjoint(names):
            missing.append(names[0])
    missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unused = [name for name in files.tensors if name not in used]
    unused = _without(unused, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    faults = [f"the files do not hold {listed(missing)}"] if missing else []
    faults += [f"the model has no {listed(unused)}, which the files hold"] if unused else []
    if faults and strict:
        raise InputError(
            f"{'; '.join(faults)}: are these the weights of this {type(model).__name__}? strict=False loads what "
            f"there is{_untied(model, missing)}"
        )
    if faults:
        warn("; ".join(faults))
    return _Chosen(chosen, conversions)


def _untied(model: nn.Module, missing: Sequence[str]) -> str:
    """A hint about missing parameters that the model's config ties to others and the model does not."""
    tied = getattr(model, "_tied_weights_keys", None) or ()
    apart = [name for name in missing if name in tied]
    if not apart or not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return ""
    return (
        f". The model's config ties {listed(apart)} to another parameter, and here it is one of its own: call "
        "model.tie_weights() before planning (accelerate's init_empty_weights parts what is tied)"
    )


def _sources(model: nn.Module, tensors: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """The name in the files for each name of the model found there; transformers' prefix may be on one side only."""
    stored = set(stored)
    sources = {name: name for name in tensors if name in stored}
    prefix = getattr(model, "base_model_prefix", "")
    if prefix:
        start = f"{prefix}."
        for name in tensors:
            other = name.removeprefix(start) if name.startswith(start) else start + name
            if name not in stored and other in stored and other not in sources:
                sources[name] = other
    return sources


def _without(names: Sequence[str], patterns: Iterable[str] | None) -> list[str]:
    """The names without those that the model's class declares optional."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _check(name: str, tensor: torch.Tensor, files: WeightFiles, sources: Sequence[str]) -> None:
    for source in sources:
        stored = files.tensors[source]
        if stored.shape != tuple(tensor.shape):
            raise InputError(
                f"'{source}' is of shape {stored.shape} in {stored.file.name}, the model's '{name}' of "
                f"{tuple(tensor.shape)}: build the model with the config of these weights"
            )
        if stored.dtype.startswith(_WHOLE_NUMBERS) == tensor.is_floating_point():
            raise InputError(
                f"'{source}' holds {stored.dtype} numbers in {stored.file.name}, the model's '{name}' {tensor.dtype}"
            )


@torch.no_grad()
def _load(model: nn.Module, planned: Planned, names: list[str], files: WeightFiles, sources: Sequence[str]) -> int:
    """Read this rank's part of one tensor and store it; returns the bytes read."""
    tensor = tensor_at(model, names[0])
    ranges = ranges_of(tensor)
    first, *others = [files.read(source, ranges) for source in sources]
    for source, other in zip(sources[1:], others, strict=True):
        if not torch.equal(first, other):
            raise InputError(
                f"the model ties {listed(names)}, and the files hold other values in '{source}' than in '{sources[0]}'"
                ": build the model without tied weights (tie_word_embeddings=False)"
            )
    _store_piece(model, planned, names, first)
    return first.nbytes * len(sources)


@torch.no_grad()
def _convert(model: nn.Module, planned: Planned, conversion: Conversion, files: WeightFiles) -> int:
    """Compute whole tensors from others, and store this rank's parts; returns the bytes read."""
    tensors = stored_tensors(model)
    names_of = {name: names for names in tied_groups(tensors) for name in names}
    for name, whole in conversion.whole(model, files, tensors).items():
        _store_piece(model, planned, names_of[name], cut(whole, ranges_of(tensors[name])))
    return sum(files.size_bytes(name) for name, _ in conversion.sources)


def _store_piece(model: nn.Module, planned: Planned, names: list[str], piece: torch.Tensor) -> None:
    """Store a piece. A tensor that has values is written in place, so that its other holders see the new values."""
    tensor = tensor_at(model, names[0])
    if tensor.is_meta:
        set_value(model, planned, names, piece.to(planned.rank.device, tensor.dtype, copy=True))
    else:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(piece)
