"""The second derivative of an extremum whose ties are distributed unevenly over ranks."""

from __future__ import annotations

import torch
from simulated_mesh import SimulatedMesh

from autopar.layout import Layout
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local import LocalContext, run_local
from autopar.runtime.local.exchange import joined

ROWS = torch.tensor(
    [[-2.0, 2.0, 2.0, 1.0, 2.0, 0.0, 1.0, -1.0], [3.0, 1.0, 0.0, 1.0, -3.0, 3.0, 3.0, -3.0]], dtype=torch.float64
)
SPLIT, ROW = Layout.parse("S1"), Layout.parse("R")


def squared(slope: torch.Tensor) -> torch.Tensor:
    return slope.square().sum(1).sin().sum()


def test_it_is_shared_by_all_equal_elements_and_has_a_gradient() -> None:
    x = ROWS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(x.square().amax(1).pow(3).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(squared(slope), x)

    def work(mesh: LocalMesh) -> tuple[torch.Tensor, torch.Tensor]:
        own = ROWS.chunk(2, 1)[mesh.coordinate[0]].clone().requires_grad_()
        context = LocalContext(mesh, (SPLIT,), (ROW,), ((2, 8),), ((2,),), 0)
        found = run_local("extremum", torch.amax, (own.square(), 1), {}, context)
        (part,) = torch.autograd.grad(found.pow(3).sum(), own, create_graph=True)
        penalty = joined(part.square().sum(1), (0,), mesh).sin().sum()
        return part.detach(), torch.autograd.grad(penalty, own)[0]

    for (rank,), (part, again) in SimulatedMesh((2,)).run(work).items():
        torch.testing.assert_close(part, slope.detach().chunk(2, 1)[rank])
        torch.testing.assert_close(again, curve.chunk(2, 1)[rank])
