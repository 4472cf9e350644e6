"""All ranks while they save or load: an error on one rank is raised on all of them, so that none waits for it.

Checkpoints have a gloo process group of their own: a save in the background runs its collectives beside those of
training, and two threads must not share a group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.ranks.failures import collective_error
from autopar.runtime.ranks.meeting import meet

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # for slow disks; a rank that dies closes its connections, which is noticed
_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # by the default group


class Together:
    """The ranks of the default process group, or one process without a group; made on all ranks for the same `call`."""

    def __init__(self, call: str) -> None:
        meet(call)
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            world = dist.group.WORLD
            assert world is not None
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if world not in _groups:
                _groups[world] = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self.group = _groups[world]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise collective_error("an exchange about a checkpoint", error) from error
        return values  # type: ignore[return-value]

    def all_do(self, doing: str, work: Callable[[], T]) -> T:
        """The result of `work` on this rank, once it has succeeded on all ranks; else raises on every rank."""
        result, error = None, None
        try:
            result = work()
        except Exception as failed:  # every rank must learn of it before any of them waits
            error = failed
        texts = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise InputError(f"rank {rank} failed while {doing}, so this rank stops too: {text}")
        return result  # type: ignore[return-value]

    def first_does(self, doing: str, work: Callable[[], T]) -> T:
        """The result of `work`, which only rank 0 runs, on every rank; if it fails, raises on every rank."""
        return self.gathered(self.all_do(doing, work if self.is_first else lambda: None))[0]  # type: ignore[return-value]

    def check_same(self, name: str, value: object) -> None:
        """Raise InputError on every rank unless all hold an equal value."""
        values = self.gathered(value)
        if any(other != values[0] for other in values):
            raise InputError(f"the ranks disagree about {name}: {values[:8]}")
