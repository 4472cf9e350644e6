"""Whether all ranks make the same call: told before it can hang or train on something else, at no cost to a step.

Each call announces itself to the other ranks in the background, with a reduction of six numbers on the CPU. A rank
whose call is like its last one goes on, and reads the outcome before the next call or the optimizer's step, whichever
comes first; one whose call differs waits for it at once. Calls that were alike before can part only where some rank's
changes, so of ranks that part one waits, and says so before its first collective.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.calls import description
from autopar.runtime.failures import told

_RANK_BITS = 20
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CallSize:
    """A call in three numbers below 2^42: rows of its first tensor, elements of all of them, a digest of the rest."""

    rows: int
    elements: int
    digest: int

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallSize:
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        rows = next((t.shape[0] for t in tensors if t.ndim), 0)
        text = description(model, args, kwargs).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> (_RANK_BITS + 2)
        return CallSize(int(rows), sum(t.numel() for t in tensors), digest)


class Alike:
    """The announcements of one model. All ranks of the default process group take part."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._last: CallSize | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        _look_before_steps(self)

    def announce(self, call: CallSize) -> None:
        """Tell the others of a call that is about to be made.

        Raises InputError if the ranks' calls are not alike: the last ones, or these where this rank's is of another
        kind than its last.
        """
        self.check()
        numbers = [sign * n for n in (call.rows, call.elements, call.digest) for sign in (1, -1)]
        vector = torch.tensor([(n << _RANK_BITS) + dist.get_rank() for n in numbers])
        work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, vector
        if call != self._last:
            self.check()
        self._last = call

    def check(self) -> None:
        """Raise InputError if the calls that were announced last are not alike."""
        if self._pending is None:
            return
        (work, vector), self._pending = self._pending, None
        try:
            work.wait()
        except RuntimeError as error:
            raise told("the ranks' agreement on the shapes of this call", error) from error
        found = [(n >> _RANK_BITS, n & ((1 << _RANK_BITS) - 1)) for n in vector.tolist()]
        names = ("rows", "elements in all inputs")
        for name, (most, at_most), (least, at_least) in zip(names, found[0::2], found[1::2], strict=False):
            if most != -least:
                raise InputError(
                    "the ranks were given inputs of different shapes in one call: "
                    f"rank {at_least} has {-least} {name}, rank {at_most} has {most}. "
                    "Give all ranks the same: deal rows out with autopar.sampler or autopar.local_batch, leave out a "
                    "smaller last batch, and pad to one length on all ranks"
                )
        (most, at_most), (least, at_least) = found[4:]
        if most != -least:
            raise InputError(
                f"ranks {at_least} and {at_most} make different calls of the model: its arguments, their shapes, "
                "train() or eval(), and no_grad() are the same on all ranks"
            )


def group_of_all() -> dist.ProcessGroup | None:
    """The default process group (as None) where it has a backend for the CPU, else a new one of gloo."""
    world = dist.group.WORLD
    assert world is not None
    try:
        world._get_backend(_CPU)
    except RuntimeError:  # NCCL alone: reading a number from a GPU would hold up its queue
        return dist.new_group(backend="gloo")
    return None


def _look_before_steps(alike: Alike) -> None:
    """Before every optimizer's step look at the calls that it trains on; for as long as `alike` lives."""
    reference = weakref.ref(alike)

    def hook(*_: Any) -> None:
        living = reference()
        if living is not None:
            living.check()

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(alike, handle.remove)
