"""Simulated ranks: one thread for each, whose collectives meet at barriers, so that one process runs a whole mesh."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from autopar.runtime.communication import collectives
from autopar.runtime.communication.collectives import LocalMesh

Coordinate = tuple[int, ...]
Result = TypeVar("Result")


class Sent(NamedTuple):
    """A collective, as one rank took part in it; `elements` and `bytes` of its input."""

    kind: str
    axis: int
    elements: int
    bytes: int


class SimulatedMesh:
    """A mesh of threads. `run(work)` calls `work(local_mesh)` once for each rank, all concurrently.

    `sent`: the collectives of each coordinate, in order.
    """

    def __init__(self, shape: Sequence[int], timeout_seconds: float = 30) -> None:
        self.shape = tuple(shape)
        self.coordinates = list(itertools.product(*map(range, shape)))
        groups = {group: axis for c in self.coordinates for axis, group in enumerate(self._groups(c))}
        self.sent: dict[Coordinate, list[Sent]] = {c: [] for c in self.coordinates}
        self._barriers = {g: threading.Barrier(shape[axis], timeout=timeout_seconds) for g, axis in groups.items()}
        self._handed: dict[str, dict[int, Any]] = {group: {} for group in groups}
        self._here = threading.local()

    def run(self, work: Callable[[LocalMesh], Result]) -> dict[Coordinate, Result]:
        """The results of all ranks; raises the first error of any rank, after which the others stop waiting."""
        errors: list[BaseException] = []

        def on_rank(coordinate: Coordinate) -> Any:
            self._here.coordinate = coordinate
            try:
                return work(self.view(coordinate))
            except BaseException as error:
                errors.append(error)
                for barrier in self._barriers.values():
                    barrier.abort()
                return None

        with self._collectives(), ThreadPoolExecutor(len(self.coordinates)) as pool:
            results = dict(zip(self.coordinates, pool.map(on_rank, self.coordinates), strict=True))
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results

    def view(self, coordinate: Coordinate) -> LocalMesh:
        """The mesh as the rank at this coordinate sees it."""
        return LocalMesh(self.shape, coordinate, self._groups(coordinate))

    def count(self, coordinate: Coordinate) -> Counter[tuple[str, int, int]]:
        """How often a rank took part in each collective, told apart by kind, axis and input elements."""
        return Counter((sent.kind, sent.axis, sent.elements) for sent in self.sent[coordinate])

    def _groups(self, coordinate: Coordinate) -> tuple[str, ...]:
        def name(axis: int) -> str:
            return f"{axis}:" + ",".join("*" if a == axis else str(c) for a, c in enumerate(coordinate))

        return tuple(map(name, range(len(self.shape))))

    def _meet(self, kind: str, group: str, tensor: torch.Tensor, pieces: Sequence[int] = ()) -> tuple[list[Any], int]:
        """The inputs of all ranks of a group, in rank order, and the rank of this one; each input is split into
        `pieces` of these lengths, if given."""
        axis = int(group.partition(":")[0])
        rank, handed = self._here.coordinate[axis], self._handed[group]
        self.sent[self._here.coordinate].append(Sent(kind, axis, tensor.numel(), tensor.nbytes))
        handed[rank] = tensor.detach().split(list(pieces)) if pieces else tensor.detach()
        self._barriers[group].wait()
        inputs = [handed[other] for other in sorted(handed)]
        self._barriers[group].wait()
        return inputs, rank

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        """These collectives in place of the runtime's."""

        def all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
            stacked = torch.stack(self._meet("all_reduce", group, tensor)[0])
            return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)

        def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
            return torch.stack(self._meet("all_gather", group, tensor)[0])

        def reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
            tensors, rank = self._meet("reduce_scatter", group, tensor)
            return torch.stack([other[rank] for other in tensors]).sum(0)

        def all_to_all(tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
            assert sum(sent) == tensor.numel()
            parts, rank = self._meet("all_to_all", group, tensor, sent)
            pieces = [part[rank] for part in parts]
            assert [piece.numel() for piece in pieces] == list(received)
            return torch.cat(pieces)

        with pytest.MonkeyPatch.context() as patch:
            for function in (all_reduce, all_gather, reduce_scatter, all_to_all):
                patch.setattr(collectives, function.__name__, function)
            yield
