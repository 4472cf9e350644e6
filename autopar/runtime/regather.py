"""Parameters that are gathered again in backward: the gathered copy is not kept, the shard is.

Outside recomputed segments this needs saved-tensor hooks: whatever autograd saves of a gathered copy (the
copy itself, or a view of it such as its transpose) is replaced by the shard and the recipe, and backward
gathers anew. The hooks work in eager mode only; compiled graphs keep the copy or recompute it as the
compiler decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.convert import Recipe, convert


class _Gathered(NamedTuple):
    """Where a gathered copy came from. The weak reference keeps the storage's address from being used again."""

    storage: StorageWeakRef
    shard: torch.Tensor
    recipe: Recipe


class _Saved(NamedTuple):
    """What is kept in place of a saved view of a gathered copy."""

    shard: torch.Tensor
    version: int
    recipe: Recipe
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Regather:
    """The gathered copies of one forward call."""

    __name__ = "gathered_again_in_backward"

    def __init__(self) -> None:
        self.used = False
        self._live: dict[int, _Gathered] | None = None

    def __call__(self, whole: torch.Tensor, shard: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """Note in the local graph that `whole` is what `recipe` makes of `shard`."""
        if self._live is not None:
            storage = StorageWeakRef(whole.untyped_storage())
            self._live[storage.cdata] = _Gathered(storage, shard.detach(), recipe)
        return whole

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For the duration of one forward: gathered copies that autograd saves are saved as their shards."""
        self._live = {}
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._live = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        found = self._live.get(tensor.untyped_storage()._cdata) if self._live else None
        if found is None:
            return tensor
        shard = found.shard
        return _Saved(
            shard, shard._version, found.recipe, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    if saved.shard._version != saved.version:
        raise RuntimeError("a parameter was changed in place between forward and backward")
    with torch.no_grad():
        whole = convert(saved.shard, saved.recipe)
    return whole.as_strided(saved.size, saved.stride, saved.offset)
