"""Where every rank stands in its training: the number of calls and steps it has made, noted for the other ranks.

A thread of each process writes its note into the process group's store every few seconds, which delays no step. Notes
are read only when something is wrong: a collective did not end, or a rank waits for others to make the call that it is
about to make.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

PERIOD_SECONDS = 2.0  # between two notes of a rank; more with many ranks
_NOTES_A_SECOND = 500  # at most so many are written, by all ranks together
_SILENT_PERIODS = 5  # a rank whose note is older counts as silent
_READING = timedelta(seconds=10)  # timeout of a request to the store


class Call(NamedTuple):
    """The last call of a planned model: its ordinal number, and what it looks like (`ranks.alike.CallSize`)."""

    number: int = 0
    rows: int = 0
    elements: int = 0
    digest: int = 0


class Meeting(NamedTuple):
    """The last call that waits for all ranks (`ranks.meeting`): its ordinal number, and its name."""

    number: int = 0
    call: str = ""


@dataclass
class Standing:
    """One rank's note. `begun`: number of collectives of the default process group that it has started; `steps`: number
    of completed calls of `optimizer.step()`; `time`: when the note was written, in seconds since the epoch; `ended`:
    whether the process has left Python.

    The fields are in the order in which a note reads them: a note that shows a later call or collective also shows what
    came before it.
    """

    begun: int = 0
    call: Call = field(default_factory=Call)
    meeting: Meeting = field(default_factory=Meeting)
    steps: int = 0
    time: float = 0.0
    ended: bool = False


mine = Standing()
"""The note of this process."""


class Notes:
    """The notes of all ranks of the default process group, in its store."""

    def __init__(self) -> None:
        # held until the process ends: destroying a group waits for a collective in it that not all ranks have joined
        self.group, self._rank, self._ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        self.period_seconds = max(PERIOD_SECONDS, self._ranks / _NOTES_A_SECOND)
        default = c10d._get_default_store()  # torch has no public call for it
        self._store = default.clone()  # type: ignore[attr-defined]  # others may block on the first connection
        self._store.set_timeout(_READING)
        self._over = threading.Event()
        self._write()
        threading.Thread(target=self._go_on, name="autopar notes", daemon=True).start()

    def read(self) -> dict[int, Standing]:
        """The notes of the other ranks; empty if a rank has not written its own, or if the store is gone."""
        try:
            others = [rank for rank in range(self._ranks) if rank != self._rank]
            notes = self._store.multi_get([_key(rank) for rank in others])
            return {rank: _read(note) for rank, note in zip(others, notes, strict=True)}
        except RuntimeError:  # the process that held the store ended, or a rank died before it wrote
            return {}

    def end(self, *, process: bool) -> None:
        """Stop writing; the last note says whether the process ends."""
        self._over.set()
        mine.ended = process
        try:
            self._write()
        except RuntimeError:  # the store is gone already
            return

    def _go_on(self) -> None:
        while not self._over.wait(self.period_seconds):
            try:
                self._write()
            except RuntimeError:  # the store is gone, and nobody can read the notes any more
                return

    def _write(self) -> None:
        mine.begun, mine.time = _begun(), time.time()
        self._store.set(_key(self._rank), json.dumps(asdict(mine)))


def _key(rank: int) -> str:
    return f"autopar/standing/{rank}"


def _read(note: bytes) -> Standing:
    fields = json.loads(note)
    return Standing(**{**fields, "call": Call(*fields["call"]), "meeting": Meeting(*fields["meeting"])})


def _begun() -> int:
    """Number of collectives of the default group that this process has started."""
    world: Any = dist.group.WORLD  # torch's stubs lack the method below
    try:
        return int(world._get_sequence_number_for_group()) if world is not None else 0
    except RuntimeError:  # a backend that does not count
        return 0


_notes: list[Notes] = []


def is_fake() -> bool:
    """Whether the default group is torch's fake one for tests, which has no other ranks and no notes."""
    return dist.get_backend() == "fake"


def note_from_now_on() -> None:
    """Start writing this process's notes, once for each default process group."""
    if _notes and _notes[0].group is dist.group.WORLD:
        return
    if _notes:
        _notes.pop().end(process=False)
    if not is_fake():
        _notes.append(Notes())
        atexit.register(_notes[0].end, process=True)


def period_seconds() -> float:
    """Seconds between two notes of a rank, so how old a note may be."""
    return _notes[0].period_seconds if _notes else PERIOD_SECONDS


def notes_of_others() -> dict[int, Standing]:
    """The other ranks' notes; empty if they cannot be read."""
    return _notes[0].read() if _notes and _notes[0].group is dist.group.WORLD else {}


def compared(notes: Mapping[int, Standing]) -> str:
    """How the other ranks stand compared with this one, as a sentence for an error; "" if nothing is known.

    >>> compared({1: Standing(call=mine.call, time=time.time())}).rpartition(" (")[0]
    'All ranks have made equally many calls of planned models'
    """
    if not notes:
        return ""
    for word, apart in (
        ("only ", {rank: note for rank, note in notes.items() if note.call.number < mine.call.number}),
        ("", {rank: note for rank, note in notes.items() if note.call.number > mine.call.number}),
    ):
        if apart:
            note = apart[min(apart)]
            ended = " and ended" if note.ended else _silence(note)
            return (
                f"{listing(apart)} made {word}{note.call.number} calls of planned models{ended}, and this rank is in "
                f"its {ordinal(mine.call.number)}: every rank must make the same calls, of equally many batches "
                "(autopar.sampler deals those out)"
            )
    silent = {rank: note for rank, note in notes.items() if note.ended or _silence(note)}
    if silent:
        note = silent[min(silent)]
        return f"{listing(silent)} made as many calls as this rank ({mine.call.number}){_silence(note) or ' and ended'}"
    return f"All ranks have made equally many calls of planned models ({mine.call.number})"


def absence(notes: Mapping[int, Standing], *, certain: bool) -> str:
    """The first rank that will not come to this rank's meeting, and why; "" if the notes show none.

    `certain`: consider only what proves that a rank will not come. Otherwise also consider a collective of the default
    group that this rank has not begun, although it may be one between two ranks only.
    """
    begun = _begun()
    for rank, note in sorted(notes.items()):
        if note.meeting == mine.meeting:
            continue
        if note.meeting.number == mine.meeting.number:
            return f"rank {rank} called {note.meeting.call}"
        if note.call.number > mine.call.number:
            return f"rank {rank} went on to its {ordinal(note.call.number)} call of planned models"
        if note.ended:
            return f"rank {rank} ended"
        if note.begun > begun and not certain:
            return (
                f"rank {rank} waits in a collective that this rank has not begun, such as torch.distributed.barrier()"
            )
    return ""


def _silence(note: Standing) -> str:
    passed = time.time() - note.time
    return f" and was last heard of {passed:.0f} s ago" if passed > _SILENT_PERIODS * period_seconds() else ""


def listing(ranks: Iterable[int], most: int = 4) -> str:
    """
    >>> listing([3]), listing([1, 2, 3, 5, 8])
    ('Rank 3', 'Ranks 1, 2, 3, 5 and 1 more')
    """
    every = sorted(ranks)
    shown = ", ".join(map(str, every[:most]))
    further = f" and {len(every) - most} more" if len(every) > most else ""
    return f"Rank{'s' if len(every) > 1 else ''} {shown}{further}"


def ordinal(number: int) -> str:
    """
    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 22, 113)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '22nd', '113th']
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
