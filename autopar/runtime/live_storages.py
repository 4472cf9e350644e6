"""Bytes of all tensors that are alive, for devices whose allocator does not count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Follows the storages of given tensors and of all that ops return, until each is freed."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._follow(list(tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._follow(result)
        return result

    def _follow(self, values: Any) -> None:
        for value in pytree.tree_leaves(values):
            if not isinstance(value, torch.Tensor):
                continue
            storage = getattr(value, "_local_tensor", value).untyped_storage()
            if storage.device.type != "meta" and storage not in self._seen:  # fake tensors lie on meta too
                self._seen.add(storage)
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, count: int) -> None:
        self.live_bytes -= count
