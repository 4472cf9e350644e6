"""Bytes of all live tensors, for devices whose allocator does not count them.

Gloo's threads hold a collective's input and result for a moment after it has ended: microseconds where they find a free
core, milliseconds where they do not. So waiting for a collective here includes waiting until they let go, and the peak
is that of the step, however busy the host is.

Under a dispatch mode autograd accumulates gradients into new tensors, whereas without one it adds in place. So this
mode adds in place where autograd would: into a tensor that nobody else holds (`accumulate` in torch's
`input_buffer.cpp`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.ops.measure import storage_holders

_MOST_SECONDS = 0.5  # the longest wait for gloo's threads; what they hold after it is counted
_FUNCTIONAL = "_c10d_functional::"


class LiveStorages(TorchDispatchMode):
    """Follows the storages of given tensors and of all that ops return, until each is freed."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__()
        self._alone = _held_by_autograd_alone()
        self.live_bytes = self.peak_bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # results that gloo's threads hold
        self._follow(list(tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name == f"{_FUNCTIONAL}wait_tensor":
            result = self._let_go(func, args[0])
        elif func is torch.ops.aten.add.Tensor and self._adds_in_place(*args, **(kwargs or {})):
            result = args[0].add_(args[1])
        else:
            result = func(*args, **(kwargs or {}))
            # for a reduce-scatter, gloo reduces a copy of its own
            if name.startswith(_FUNCTIONAL) and "reduce_scatter" not in name and isinstance(result, torch.Tensor):
                self._held.add(result.untyped_storage())
        self._follow(result)
        return result

    def _adds_in_place(self, old: Any, new: Any, **kwargs: Any) -> bool:
        """Whether this addition is autograd's accumulation of gradients, into a tensor that nobody else holds."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or kwargs:
            return False
        tensors = type(old) is torch.Tensor and type(new) is torch.Tensor
        same_look = tensors and (old.shape, old.dtype) == (new.shape, new.dtype)
        return same_look and (old._use_count(), storage_holders(old)) == (self._alone, 1)

    def _let_go(self, wait: Any, tensor: torch.Tensor) -> Any:
        """Wait for a collective, and until no gloo thread holds its result any more."""
        storage = tensor.untyped_storage()
        under_way = _holders(tensor)
        result = wait(tensor)
        end = time.perf_counter() + (_MOST_SECONDS if storage in self._held and tensor.device.type == "cpu" else 0.0)
        while _holders(tensor) >= under_way and time.perf_counter() < end:
            time.sleep(1e-4)
        self._held.discard(storage)
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


class _Counts(TorchDispatchMode):
    """Records the use count of the first tensor of an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.found = args[0]._use_count()
        return func(*args, **(kwargs or {}))


@cache
def _held_by_autograd_alone() -> int:
    """The use count, as a mode sees it, of a gradient that autograd alone holds and is about to add another to."""
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 1.0
        total = (x * 2.0 + x * 3.0).sum()
    with _Counts() as counts:
        total.backward()
    return counts.found


def _holders(tensor: torch.Tensor) -> int:
    """How many references there are to a tensor and its storage: a collective under way holds one or the other."""
    of_tensor: int = tensor._use_count()  # type: ignore[attr-defined]
    return of_tensor + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
