"""Calls that every rank must make (such as `save_checkpoint`): ranks meet before the first collective of such a call.

Each rank that arrives increments a counter in the process group's store and waits there for the last to arrive: three
requests a rank, each answered once. Meanwhile the first to arrive reads the notes of the others (`ranks.standing`). A
rank that has made a later call of a planned model, has ended, or is at another meeting will not come; all that wait are
told so at once, instead of when a collective times out. A rank that may only be slow is waited for until the process
group's timeout, with a warning.
"""

from __future__ import annotations

import time
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from autopar.errors import InputError
from autopar.runtime.ranks.failures import collective_error, own_timeout
from autopar.runtime.ranks.standing import (
    Meeting,
    absence,
    is_fake,
    listing,
    mine,
    note_from_now_on,
    notes_of_others,
    period_seconds,
)
from autopar.user_warnings import warn

_WARNING_SECONDS = 20.0  # after so long, a rank that waits warns, and takes uncertain signs of absence into account
_EVEN_TIME = timedelta(seconds=30)  # the other ranks wait longer than the first, which decides for all


def meet(call: str) -> None:
    """Wait until all ranks of the default process group have come here for the same `call` (its name, for messages).

    Raises InputError, on every rank that came, if another one will not come or has not come within the process group's
    timeout; CollectiveError if the store is gone.
    """
    if not dist.is_initialized() or is_fake():
        return
    world = dist.group.WORLD
    assert world is not None
    if world not in _rooms:
        _rooms[world] = _Room(world)
    note_from_now_on()
    try:
        refusal = _rooms[world].enter(call)
    except RuntimeError as error:
        raise collective_error(f"the ranks' meeting for {call}", error) from error
    if refusal:
        raise InputError(refusal)


class _Room:
    """The meetings of one process group, in its store."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._store = c10d._get_default_store().clone()  # type: ignore[attr-defined]  # others may block on the first
        self._patience = timeout_of(world)

    def enter(self, call: str) -> str:
        """Wait for the decision; return "" if all ranks are here, else the reason why not."""
        mine.meeting = Meeting(mine.meeting.number + 1, call)
        door = f"autopar/meeting/{mine.meeting.number}/{call}"
        place = self._store.add(f"{door}/here", 1)
        if place == dist.get_world_size():
            self._decide(door, "")
        elif place == 1:
            self._watch(door, call)
        self._store.wait([door], self._patience + _EVEN_TIME)
        return str(self._store.get(door).decode())

    def _decide(self, door: str, refusal: str) -> None:
        """Publish the answer for all ranks that come here, unless one was published before."""
        if self._store.add(f"{door}/decided", 1) == 1:
            self._store.set(door, refusal)

    def _watch(self, door: str, call: str) -> None:
        """Wait for the others, and check in their notes meanwhile whether they will come."""
        begun, is_told = time.monotonic(), False
        while not self._comes(door):
            waited = time.monotonic() - begun
            absent = absence(notes_of_others(), certain=waited < _WARNING_SECONDS)
            if not absent and waited < _WARNING_SECONDS:
                continue
            late = absent or waited > self._patience.total_seconds()
            if late or not is_told:
                reason = absent or f"have waited {waited:.0f} s for {_late()}"
                arrived = self._store.add(f"{door}/here", 0)
                text = (
                    f"{arrived} of {dist.get_world_size()} ranks called {call}, and {reason}: "
                    f"every rank must call it, so take it out of `if rank == {dist.get_rank()}:` and the like"
                )
            if late:
                self._decide(door, text)
            elif not is_told:
                warn(text)
                is_told = True

    def _comes(self, door: str) -> bool:
        """Whether the meeting is decided within one period of the notes."""
        try:
            self._store.wait([door], timedelta(seconds=period_seconds()))
        except dist.DistStoreError:
            return False
        return True


_rooms: WeakKeyDictionary[dist.ProcessGroup, _Room] = WeakKeyDictionary()


def _late() -> str:
    """The ranks that have not come, according to their notes."""
    late = [rank for rank, note in notes_of_others().items() if note.meeting.number < mine.meeting.number]
    return listing(late).lower() if late else "the others"


def timeout_of(world: dist.ProcessGroup) -> timedelta:
    """The timeout that the user gave `init_process_group`, or torch's default."""
    timeouts = (own_timeout(world, device) for device in world._device_types)
    return next((timeout for timeout in timeouts if timeout is not None), default_pg_timeout)
