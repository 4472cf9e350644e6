"""Ranks simulated in one process: one thread for each, and collectives that meet at a barrier."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from autopar.runtime.communication import collectives
from autopar.runtime.communication.collectives import LocalMesh


class Meeting:
    """A place where the ranks of a group exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class SimulatedRanks:
    """All ranks of a mesh; `moves` lists the collectives of each coordinate: (kind, axis, input elements)."""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        self.mesh_shape = tuple(mesh_shape)
        self.coordinates = list(itertools.product(*map(range, mesh_shape)))
        self.meetings: dict[str, Meeting] = {}
        self.moves: dict[tuple[int, ...], list[tuple[str, int, int]]] = {c: [] for c in self.coordinates}
        self._here = threading.local()

    def run(self, work: Callable[[LocalMesh], Any]) -> dict[tuple[int, ...], Any]:
        """The results of `work` on all ranks."""
        for coordinate in self.coordinates:
            for axis, size in enumerate(self.mesh_shape):
                self.meetings.setdefault(self._group(coordinate, axis), Meeting(size))

        def one(coordinate: tuple[int, ...]) -> Any:
            self._here.coordinate = coordinate
            groups = tuple(self._group(coordinate, axis) for axis in range(len(coordinate)))
            try:
                return work(LocalMesh(self.mesh_shape, coordinate, groups))
            except BaseException:
                for meeting in self.meetings.values():
                    meeting.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.coordinates)) as pool:
            futures = [pool.submit(one, coordinate) for coordinate in self.coordinates]
            errors = [e for f in futures if (e := f.exception()) is not None]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error
            return dict(zip(self.coordinates, (f.result() for f in futures), strict=True))

    @staticmethod
    def _group(coordinate: tuple[int, ...], axis: int) -> str:
        return f"{axis}:" + ",".join("*" if i == axis else str(c) for i, c in enumerate(coordinate))

    def exchange(self, kind: str, group: str, value: Any, elements: int) -> tuple[list[Any], int]:
        """The values of all ranks of the group, and this rank's index in it."""
        axis = int(group.split(":")[0])
        rank = self._here.coordinate[axis]
        self.moves[self._here.coordinate].append((kind, axis, elements))
        return self.meetings[group].exchange(rank, value), rank

    def all_reduce(self, tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        values, _ = self.exchange("all_reduce", group, tensor, tensor.numel())
        stacked = torch.stack(values)
        return stacked.sum(0) if op == "sum" else getattr(stacked, "a" + op)(0)

    def all_gather(self, tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
        return torch.stack(self.exchange("all_gather", group, tensor, tensor.numel())[0])

    def reduce_scatter(self, tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
        values, rank = self.exchange("reduce_scatter", group, tensor, tensor.numel())
        return torch.stack([value[rank] for value in values]).sum(0)

    def all_to_all(
        self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str
    ) -> torch.Tensor:
        assert sum(sent) == tensor.numel()
        values, rank = self.exchange("all_to_all", group, tensor.split(list(sent)), tensor.numel())
        pieces = [value[rank] for value in values]
        assert [piece.numel() for piece in pieces] == list(received)
        return torch.cat(pieces)


@pytest.fixture(scope="module")
def simulated() -> Iterator[Callable[[Sequence[int]], SimulatedRanks]]:
    """Makes simulated ranks of a mesh of the given shape, whose collectives replace the real ones."""
    with pytest.MonkeyPatch.context() as patch:

        def make(mesh_shape: Sequence[int]) -> SimulatedRanks:
            ranks = SimulatedRanks(mesh_shape)
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                patch.setattr(collectives, name, getattr(ranks, name))
            return ranks

        yield make
