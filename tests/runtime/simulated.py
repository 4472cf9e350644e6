"""Simulated ranks in threads: the runtime's collectives meet at barriers, so one process runs a whole mesh."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from autopar.runtime.communication import collectives
from autopar.runtime.communication.collectives import LocalMesh

Coordinate = tuple[int, ...]
T = TypeVar("T")


class SimulatedMesh:
    """A mesh of threads. `run(work)` calls `work(local_mesh)` once for each rank, all concurrently."""

    def __init__(self, shape: tuple[int, ...], timeout_seconds: float = 30) -> None:
        self.shape = shape
        self.coordinates = list(itertools.product(*map(range, shape)))
        groups = {group: axis for c in self.coordinates for axis, group in enumerate(self._groups(c))}
        self.barriers = {g: threading.Barrier(shape[axis], timeout=timeout_seconds) for g, axis in groups.items()}
        self.handed: dict[str, dict[int, Any]] = {group: {} for group in groups}
        self.here = threading.local()

    def _groups(self, coordinate: Coordinate) -> tuple[str, ...]:
        def name(axis: int) -> str:
            return f"{axis}:" + ",".join("*" if a == axis else str(c) for a, c in enumerate(coordinate))

        return tuple(map(name, range(len(self.shape))))

    def run(self, work: Callable[[LocalMesh], T]) -> dict[Coordinate, T]:
        """The results of all ranks; raises the first error of any rank, after which the others stop waiting."""
        errors: list[BaseException] = []

        def one(coordinate: Coordinate) -> Any:
            self.here.coordinate = coordinate
            try:
                return work(LocalMesh(self.shape, coordinate, self._groups(coordinate)))
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError) or not errors:
                    errors.append(error)
                for barrier in self.barriers.values():
                    barrier.abort()
                return None

        with self._collectives(), ThreadPoolExecutor(len(self.coordinates)) as pool:
            found = dict(zip(self.coordinates, pool.map(one, self.coordinates), strict=True))
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return found

    def _meet(self, mine: Any, group: str) -> list[Any]:
        """The values that the ranks of the group passed, in rank order."""
        axis = int(group.partition(":")[0])
        handed = self.handed[group]
        handed[self.here.coordinate[axis]] = mine
        self.barriers[group].wait()
        found = [handed[rank] for rank in sorted(handed)]
        self.barriers[group].wait()
        return found

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        def rank(group: str) -> int:
            found: int = self.here.coordinate[int(group.partition(":")[0])]
            return found

        def all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
            stacked = torch.stack(self._meet(tensor.detach(), group))
            return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)

        def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
            return torch.stack(self._meet(tensor.detach(), group))

        def reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
            return torch.stack(self._meet(tensor.detach(), group)).sum(0)[rank(group)]

        def all_to_all(tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
            parts = self._meet(tensor.detach().split(list(sent)), group)
            mine = [pieces[rank(group)] for pieces in parts]
            assert [len(piece) for piece in mine] == list(received)
            return torch.cat(mine)

        with pytest.MonkeyPatch.context() as patch:
            for function in (all_reduce, all_gather, reduce_scatter, all_to_all):
                patch.setattr(collectives, function.__name__, function)
            yield
