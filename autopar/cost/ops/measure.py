"""Measures one call on data-free tensors: FLOPs, storages saved for backward, bytes that its kernels move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.flops import TotalFlops

# These read only as many bytes of their first argument as they return.
_PICKS = {"embedding", "index_select", "gather", "index", "take", "select_backward", "slice_backward"}
# These copy a whole tensor, to other strides or another dtype.
_COPIES = {"clone", "_to_copy"}
# These allocate a tensor without writing it.
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass
class Measured:
    """One call, forward and backward, on meta tensors. Storages are keyed by identity, since every `data_ptr()` is
    0."""

    outputs: list[torch.Tensor]
    flops_forward: int = 0
    flops_backward: int = 0
    saved: dict[int, int] = field(default_factory=dict)  # storage identity -> bytes
    copied: dict[int, int] = field(default_factory=dict)  # storage that is a copy of a whole one -> the original
    forward: Traffic = field(default_factory=lambda: Traffic())
    backward: Traffic = field(default_factory=lambda: Traffic())


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage behind a tensor, valid as long as some tensor on it is alive."""
    return int(tensor.untyped_storage()._cdata)


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors hold the storage behind a tensor: itself, its views, its base."""
    storage = tensor.untyped_storage()  # one more holder, hence - 1
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading or writing all of a tensor moves; an expanded tensor has only the bytes of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class Traffic(TorchDispatchMode):
    """Counts what every kernel under it reads and writes; an op whose outputs are views runs no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0
        self.kernels = 0
        self.read_bytes: dict[int, int] = {}  # storage identity -> bytes
        self.copied: dict[int, int] = {}  # storage identity of a copy -> that of the original
        self._alive: list[torch.Tensor] = []  # keeps all storages alive, so that identities stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _ALLOCATES:
            return out
        reads = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        writes = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self._alive += reads + writes
        if not func._schema.is_mutable:
            sources = {storage_id(t) for t in reads}
            writes = [t for t in writes if storage_id(t) not in sources]
            if not writes:
                return out
        if func.overloadpacket.__name__ in _COPIES and _has_all(reads[0]):
            source = storage_id(reads[0])
            self.copied[storage_id(writes[0])] = self.copied.get(source, source)
        written = sum(map(touched_bytes, writes))
        picks = func.overloadpacket.__name__ in _PICKS
        for i, tensor in enumerate(reads):
            read = min(touched_bytes(tensor), written) if picks and i == 0 else touched_bytes(tensor)
            self.moved_bytes += read
            self.read_bytes[storage_id(tensor)] = self.read_bytes.get(storage_id(tensor), 0) + read
        self.moved_bytes += written
        self.kernels += 1
        return out


def _has_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor has every element of its storage exactly once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def measure(call: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Measured:
    """Run `call` and its backward towards those `inputs` that require a gradient, all on the meta device.

    FLOPs are counted by `autopar.ops.flops`; those of backward depend on which inputs require a gradient. Saved
    storages are those that `saved_tensors_hooks` sees, each counted once and whole.
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    counter, forward, backward = TotalFlops(), Traffic(), Traffic()
    with counter:
        with forward, saved_tensors_hooks(pack, lambda tensor: tensor):
            value = call()
        flops_forward = counter.get_total_flops()
        outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        heads = [t for t in outputs if t.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        if heads and leaves:
            with backward:
                torch.autograd.grad(heads, leaves, [torch.empty_like(t) for t in heads], allow_unused=True)
    return Measured(
        outputs,
        flops_forward,
        counter.get_total_flops() - flops_forward,
        {storage_id(t): t.untyped_storage().nbytes() for t in saved},
        forward.copied,
        forward,
        backward,
    )
