"""What autograd saves of a call whose gathered copies are made again: places of these, and versions of all else."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.communication.buckets import Bucket

if TYPE_CHECKING:
    from autopar.runtime.communication.gathers import Gathers


class Gathered(NamedTuple):
    """Where a gathered copy came from. The weak reference keeps the storage's address from being used again."""

    storage: StorageWeakRef
    bucket: Bucket
    member: int


class Kept(NamedTuple):
    """What else is saved, and its version then: torch compares versions of that alone which no hook packs."""

    gathers: Gathers
    tensor: torch.Tensor
    version: int


class Saved(NamedTuple):
    """What is kept in place of a saved view of a gathered copy."""

    gathers: Gathers
    bucket: Bucket
    member: int
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view, of the member gathered again. It may see numbers of another dtype (`view_as_complex`), and have
        the conjugate or the negative computed when it is read."""
        if whole.dtype == self.dtype:
            view = whole.as_strided(self.size, self.stride, self.offset)
        else:
            view = whole.new_empty(0, dtype=self.dtype)
            view.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view
