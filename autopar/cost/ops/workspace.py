"""Measures the temporaries of one call on data-free tensors, and which gradients alias other gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.ops.measure import storage_holders, storage_id, touched_bytes
from autopar.cost.ops.node_cost import NodeCost


@dataclass(frozen=True)
class Workspace:
    """Bytes of temporaries in forward and backward; for each input, the output whose gradient is the input's gradient
    too, and whether the input's gradient is a view, into which autograd does not accumulate in place."""

    forward_bytes: int
    backward_bytes: int
    gradient_alias_of: tuple[int | None, ...]
    gradient_is_view: tuple[bool, ...]

    def added_to(self, cost: NodeCost, places: Sequence[int], *, at_once: bool) -> NodeCost:
        """A node's cost with these figures. `places`: the index here of each of the node's inputs. `at_once`: the op is
        one kernel, and `cost` already has its temporaries."""
        return replace(
            cost,
            gradient_alias_of=tuple(self.gradient_alias_of[place] for place in places),
            gradient_is_view=tuple(self.gradient_is_view[place] for place in places),
            workspace_forward_bytes=cost.workspace_forward_bytes if at_once else self.forward_bytes,
            workspace_backward_bytes=cost.workspace_backward_bytes if at_once else self.backward_bytes,
        )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that ops under it have made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def given(self, tensors: Sequence[torch.Tensor]) -> None:
        """Exclude these tensors, which exist already."""
        self._seen.update(t.untyped_storage() for t in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self.live_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, count: int) -> None:
        self.live_bytes -= count


def measure_workspace(call: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Workspace:
    """Run `call` and its backward towards those `inputs` that require a gradient, all on the meta device.

    >>> x = torch.empty(4, 8, device="meta", requires_grad=True)
    >>> measure_workspace(lambda: (x * 2.0).exp().sum(1), [x])
    Workspace(forward_bytes=112, backward_bytes=0, gradient_alias_of=(None,), gradient_is_view=(False,))
    """
    live = LiveBytes()
    live.given(inputs)
    with live:
        value = call()
    outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    forward = live.peak_bytes - live.live_bytes
    heads = [(i, t) for i, t in enumerate(outputs) if t.requires_grad]
    places = [i for i, t in enumerate(inputs) if t.requires_grad]
    alias: list[int | None] = [None] * len(inputs)
    views = [False] * len(inputs)
    if not heads or not places:
        return Workspace(forward, 0, tuple(alias), tuple(views))
    given = [torch.empty_like(t) for _, t in heads]
    live.given(given)
    before = live.peak_bytes = live.live_bytes
    with live:
        gradients = torch.autograd.grad([t for _, t in heads], [inputs[i] for i in places], given, allow_unused=True)
    source = {storage_id(t): i for (i, _), t in zip(heads, given, strict=True)}
    own: dict[int, int] = {}
    for place, gradient in zip(places, gradients, strict=True):
        if gradient is not None:
            alias[place] = source.get(storage_id(gradient))
            views[place] = _is_view(gradient)
            if alias[place] is None:
                own[storage_id(gradient)] = touched_bytes(gradient)  # not the rest of a larger storage (rfft)
    return Workspace(forward, max(0, live.peak_bytes - before - sum(own.values())), tuple(alias), tuple(views))


def _is_view(tensor: torch.Tensor) -> bool:
    """Whether another tensor holds its storage, as the base of a view does; this also works without autograd."""
    return storage_holders(tensor) > 1
