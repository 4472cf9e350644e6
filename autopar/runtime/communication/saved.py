"""What is saved for backward in a call that gathers again: references to gathered copies, other tensors' versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.communication.buckets import Bucket

if TYPE_CHECKING:
    from autopar.runtime.communication.gathers import Gathers


class Gathered(NamedTuple):
    """The bucket member of a gathered copy. The weak reference keeps the storage's address from being used again."""

    storage: StorageWeakRef
    bucket: Bucket
    member: int


class Kept(NamedTuple):
    """Any other saved tensor and its version then: torch compares versions only of tensors that no hook packs."""

    gathers: Gathers
    tensor: torch.Tensor
    version: int


class Saved(NamedTuple):
    """What is saved in place of a gathered copy or a view of it."""

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
        """The saved view, on the member gathered again. It may have another dtype than the member (`view_as_complex`),
        and a lazy conjugate or negative."""
        if whole.dtype == self.dtype:
            view = whole.as_strided(self.size, self.stride, self.offset)
        else:
            view = whole.new_empty(0, dtype=self.dtype)
            view.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
        view = view.conj() if self.conjugate else view
        return torch._neg_view(view) if self.negative else view
