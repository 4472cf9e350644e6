"""Simulated ranks for the executed check: the runtime's local code, with ranks that communicate in threads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from simulated_mesh import SimulatedMesh
from torch import fx

from autopar.graph import output_tensors, tensor_inputs, tensor_of
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local import LocalContext, run_local
from autopar.strategies import Strategy
from autopar.strategies.check import LocalRun
from autopar.strategies.examples import callable_of

sys.path.insert(0, str(Path(__file__).parent))
EXCHANGING = {"cross_entropy", "log_softmax", "extremum", "batch_norm", "instance_norm", "sdpa_causal"}
EXCHANGING |= {"experts_exchanged", "routed"}
Coordinate = tuple[int, ...]


class SimulatedRanks:
    """Ranks as `strategies.check` wants them, which run the runtime's own local code on a simulated mesh."""

    def run(
        self, node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], work: Mapping[Coordinate, LocalRun]
    ) -> dict[Coordinate, LocalRun]:
        mesh = SimulatedMesh(mesh_shape)
        if strategy.local not in EXCHANGING:
            for coordinate in work:
                _run_local(node, strategy, mesh.view(coordinate), work[coordinate])
            return dict(work)
        mesh.run(lambda view: _run_local(node, strategy, view, work[view.coordinate]))
        _check_sent(node, strategy, mesh)
        return dict(work)


def _run_local(node: fx.Node, strategy: Strategy, view: LocalMesh, part: LocalRun) -> None:
    args, kwargs = part.arguments()
    function = callable_of(node)
    if strategy.local:
        outputs = tuple(tuple(t.shape) for t in output_tensors(node))
        inputs = tuple(tuple(tensor_of(ref).shape) for ref in tensor_inputs(node))
        context = LocalContext(view, strategy.inputs, strategy.outputs, inputs, outputs, 0)
        result = run_local(strategy.local, function, args, kwargs, context, torch.tensor(35))
    else:
        result = function(*args, **kwargs)
    part.finish(result)


def _check_sent(node: fx.Node, strategy: Strategy, mesh: SimulatedMesh) -> None:
    """Check that ranks have sent what the strategy announces: (axis, input bytes) of each collective."""
    announced = [(i.axis, size) for i in strategy.inner for size in (i.forward_bytes, i.backward_bytes) if size]
    sent_by = {coordinate: [(s.axis, s.bytes) for s in sent] for coordinate, sent in mesh.sent.items()}
    if strategy.local == "sdpa_causal":  # here all goes to one rank; count what the announced, even exchange would send
        sent_by = {where: [_as_exchanged(each, mesh.shape) for each in sent] for where, sent in sent_by.items()}
    if strategy.local == "experts_exchanged":  # one rank's bytes depend on data, but together they send all routes
        all_sent = [each for sent in sent_by.values() for each in sent]
        assert len(all_sent) == len(announced) * len(sent_by)
        assert sum(size for _, size in all_sent) == len(sent_by) * sum(size for _, size in announced)
        return
    for coordinate, sent in sent_by.items():
        message = f"collectives inside {node.target} on {coordinate}"
        pairs = list(zip(sorted(sent), sorted(announced), strict=True))
        if any(coordinate):  # if shards are uneven, the first rank has the largest
            assert all(axis == other and size <= most for (axis, size), (other, most) in pairs), message
        else:
            assert all(actual == promised for actual, promised in pairs), message


def _as_exchanged(sent: tuple[int, int], mesh_shape: tuple[int, ...]) -> tuple[int, int]:
    axis, size = sent
    return axis, -(-size * mesh_shape[axis] // (mesh_shape[axis] - 1))


@pytest.fixture(scope="module")
def ranks() -> SimulatedRanks:
    """Ranks whose collectives are simulated."""
    return SimulatedRanks()
