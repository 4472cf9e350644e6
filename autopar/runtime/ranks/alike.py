"""Checks that all ranks make the same call of a model before it can hang or train on wrong data, at no cost to a step.

A call like the rank's previous one is only counted. A call that differs is compared with the other ranks' before it
runs: by an all-reduce of eight numbers on the CPU, whose result is waited for. After equal calls, ranks can diverge
only if the call of some rank changes. That rank starts the comparison and waits, before its first collective. If the
other ranks' calls did not change, they do not take part in the all-reduce; so the waiting rank reads in their notes
(`ranks.standing`) what they do.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.entries import FORWARD, Entry
from autopar.errors import InputError
from autopar.runtime.calling.calls import description
from autopar.runtime.ranks.failures import collective_error
from autopar.runtime.ranks.meeting import timeout_of
from autopar.runtime.ranks.standing import Call, is_fake, mine, notes_of_others, ordinal, period_seconds

_RANK_BITS = 20  # lowest bits of a compared number, which hold the rank
_CPU = torch.device("cpu")
_LOOKING = 64  # at most so many ranks read notes at a time, as each reads those of all ranks
_PAUSES = 1e-4, 0.05  # seconds between polls of the all-reduce: the first pause, and the longest

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # gloo groups, by default group


@dataclass(frozen=True)
class CallSize:
    """A call in three numbers below 2^42: rows of its first tensor, elements of all tensors, a digest of the rest."""

    rows: int
    elements: int
    digest: int

    @staticmethod
    def of(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        changed: Mapping[str, str],
        entry: Entry = FORWARD,
        *,
        reads_memory: bool,
    ) -> CallSize:
        """`changed`: values of the model that were set since it was planned, by name.

        `reads_memory`: as in `call_key`.
        """
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        rows = next((t.shape[0] for t in tensors if t.ndim), 0)
        text = (
            str(entry)
            + description(model, args, kwargs, reads_memory=reads_memory)
            + (repr(changed) if changed else "")
        )
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (_RANK_BITS + 2)
        return CallSize(int(rows), sum(t.numel() for t in tensors), digest)


class Alike:
    """Compares the calls of one model. All ranks of the default process group take part."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._last: CallSize | None = None

    def announce(self, call: CallSize) -> None:
        """Note a call that is about to be made; if it is of another kind than the previous one, compare it first.

        Raises InputError if another rank makes a different call.
        """
        mine.call = Call(mine.call.number + 1, call.rows, call.elements, call.digest)
        if call != self._last:
            if not is_fake():
                self._compare()
            self._last = call

    def _compare(self) -> None:
        vector = torch.tensor(_numbers(mine.call, dist.get_rank()), device=_CPU)  # whatever the default device is
        work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        pause, longest = _PAUSES
        looked, turns = time.monotonic(), dist.get_rank()
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, longest)
            if time.monotonic() - looked > period_seconds():
                looked, turns = time.monotonic(), turns + 1
                if turns % math.ceil(dist.get_world_size() / _LOOKING) == 0:
                    _look_around()
        try:
            work.wait()
        except RuntimeError as error:
            raise collective_error("the ranks' agreement on the shapes of this call", error) from error
        _check(vector.tolist())


def _look_around() -> None:
    """Raise InputError if a rank that has reached this call, or a later one, makes a different call."""
    own = _numbers(mine.call, dist.get_rank())
    for rank, note in notes_of_others().items():
        if note.call.number >= mine.call.number:
            _check([max(pair) for pair in zip(own, _numbers(note.call, rank), strict=True)])


def _numbers(call: Call, rank: int) -> list[int]:
    """A call encoded for a max-reduction: each number and its negative, with the rank in the low bits."""
    return [(sign * number << _RANK_BITS) + rank for number in call for sign in (1, -1)]


def _check(largest: Sequence[int]) -> None:
    """Raise InputError unless all ranks' calls are equal, given the maxima of their `_numbers`."""
    extremes = [(n >> _RANK_BITS, n & ((1 << _RANK_BITS) - 1)) for n in largest]
    (most, at_most), (least, at_least) = extremes[:2]
    if most != -least:
        raise InputError(
            f"rank {at_least} makes its {ordinal(-least)} call of planned models where rank {at_most} makes its "
            f"{ordinal(most)}: every rank must make the same calls, of equally many batches (autopar.sampler deals "
            "those out)"
        )
    names = ("rows", "elements in all inputs")
    for name, (most, at_most), (least, at_least) in zip(names, extremes[2::2], extremes[3::2], strict=False):
        if most != -least:
            raise InputError(
                "the ranks were given inputs of different shapes in one call: "
                f"rank {at_least} has {-least} {name}, rank {at_most} has {most}. "
                "Give all ranks the same: deal rows out with autopar.sampler or autopar.local_batch, leave out a "
                "smaller last batch, and pad to one length on all ranks"
            )
    (most, at_most), (least, at_least) = extremes[6:]
    if most != -least:
        raise InputError(
            f"ranks {at_least} and {at_most} make different calls of the model: its arguments, their shapes, "
            "train() or eval(), no_grad() and the values set on its modules are the same on all ranks"
        )


def group_of_all() -> dist.ProcessGroup | None:
    """The default process group (as None) if it has a backend for the CPU, else a new gloo group."""
    world = dist.group.WORLD
    assert world is not None
    try:
        world._get_backend(_CPU)
    except RuntimeError:  # NCCL alone: reading a result from a GPU would synchronise with its stream
        if world not in _groups:
            _groups[world] = dist.new_group(backend="gloo", timeout=timeout_of(world))
        return _groups[world]
    return None
