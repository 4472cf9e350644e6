"""Simulated ranks for the executed check: the runtime's local code, with ranks that communicate in threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import fx

from autopar.graph import output_tensors, tensor_inputs, tensor_of
from autopar.runtime.communication import collectives
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local import LocalContext, run_local
from autopar.strategies import Strategy
from autopar.strategies.check import LocalRun
from autopar.strategies.examples import callable_of

sys.path.insert(0, str(Path(__file__).parent))
EXCHANGING = {"cross_entropy", "log_softmax", "extremum", "batch_norm", "instance_norm", "sdpa_causal"}
EXCHANGING |= {"experts_exchanged", "routed"}
Coordinate = tuple[int, ...]


class Simulated:
    """All ranks of a mesh in this process, with the runtime's own local code."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.barriers: dict[str, threading.Barrier] = {}
        self.values: dict[str, dict[int, torch.Tensor]] = {}
        self.moves: dict[Coordinate, list[tuple[int, int]]] = {}  # for each collective (axis, input bytes)

    def run(
        self, node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], work: Mapping[Coordinate, LocalRun]
    ) -> dict[Coordinate, LocalRun]:
        def one(coordinate: Coordinate) -> None:
            self.here.coordinate = coordinate
            self._local(node, strategy, mesh_shape, coordinate, work[coordinate])

        if strategy.local not in EXCHANGING:
            for coordinate in work:
                one(coordinate)
            return dict(work)
        for coordinate in work:
            for axis, size in enumerate(mesh_shape):
                self.barriers[_group(coordinate, axis)] = threading.Barrier(size, timeout=20)
                self.values[_group(coordinate, axis)] = {}
        self.moves = {coordinate: [] for coordinate in work}
        with ThreadPoolExecutor(len(work)) as pool:
            for done in [pool.submit(one, coordinate) for coordinate in work]:
                done.result()
        # here all goes to one rank; count what the announced, even exchange would send
        if strategy.local == "sdpa_causal":
            self.moves = {
                where: [_as_exchanged(move, mesh_shape) for move in moves] for where, moves in self.moves.items()
            }
        announced = [(i.axis, size) for i in strategy.inner for size in (i.forward_bytes, i.backward_bytes) if size]
        if (
            strategy.local == "experts_exchanged"
        ):  # a single rank's bytes depend on data, but together they send all routes
            moves = [move for coordinate in work for move in self.moves[coordinate]]
            assert len(moves) == len(announced) * len(work)
            assert sum(size for _, size in moves) == len(work) * sum(size for _, size in announced)
            return dict(work)
        for coordinate, moves in self.moves.items():
            message = f"collectives inside {node.target} on {coordinate}"
            pairs = list(zip(sorted(moves), sorted(announced), strict=True))
            if any(coordinate):  # if shards are uneven, the first rank has the largest
                assert all(axis == other and size <= most for (axis, size), (other, most) in pairs), message
            else:
                assert all(move == promised for move, promised in pairs), message
        return dict(work)

    def _local(
        self, node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], coordinate: Coordinate, part: LocalRun
    ) -> None:
        args, kwargs = part.arguments()
        function = callable_of(node)
        if strategy.local:
            mesh = LocalMesh(mesh_shape, coordinate, tuple(_group(coordinate, a) for a in range(len(mesh_shape))))
            shapes = tuple(tuple(t.shape) for t in output_tensors(node))
            given = tuple(tuple(tensor_of(ref).shape) for ref in tensor_inputs(node))
            context = LocalContext(mesh, strategy.inputs, strategy.outputs, given, shapes, 0)
            result = run_local(strategy.local, function, args, kwargs, context, torch.tensor(35))
        else:
            result = function(*args, **kwargs)
        part.finish(result)

    def all_reduce(self, tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
        """Replaces the collective: the ranks of a group meet twice at its barrier."""
        axis = int(group.partition(":")[0])
        self.moves[self.here.coordinate].append((axis, tensor.numel() * tensor.element_size()))
        values = self.values[group]
        values[self.here.coordinate[axis]] = tensor
        self.barriers[group].wait()
        stacked = torch.stack([values[rank] for rank in sorted(values)])
        self.barriers[group].wait()
        return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)

    def all_to_all(self, tensor: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
        axis = int(group.partition(":")[0])
        self.moves[self.here.coordinate].append((axis, tensor.numel() * tensor.element_size()))
        values, mine = self.values[group], self.here.coordinate[axis]
        values[mine] = tensor.detach().split(sent)  # type: ignore[assignment]
        self.barriers[group].wait()
        parts = [values[rank][mine] for rank in sorted(values)]
        self.barriers[group].wait()
        assert [len(part) for part in parts] == received
        return torch.cat(parts)


def _as_exchanged(move: tuple[int, int], mesh_shape: tuple[int, ...]) -> tuple[int, int]:
    axis, size = move
    return axis, -(-size * mesh_shape[axis] // (mesh_shape[axis] - 1))


def _group(coordinate: Coordinate, axis: int) -> str:
    return f"{axis}:" + ",".join("*" if a == axis else str(c) for a, c in enumerate(coordinate))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Simulated]:
    """Ranks whose collectives are simulated."""
    with pytest.MonkeyPatch.context() as patch:
        simulated = Simulated()
        patch.setattr(collectives, "all_reduce", simulated.all_reduce)
        patch.setattr(collectives, "all_to_all", simulated.all_to_all)
        yield simulated
