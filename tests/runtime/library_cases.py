"""What losses of libraries do in forward, on real ranks: communicate between ranks, and differentiate by inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from loop_cases import ROWS, Net, Prepare, in_presets, trained
from torch import nn


class Centred(Net):
    """Centred outputs as in DINO's teacher: the mean is taken over all ranks, if there are several."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.down(torch.tanh(self.up(x)))
        mean = found.detach().mean(0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        self.centre.mul_(0.9).add_(0.1 * mean)
        return (found - self.centre).square().mean()


def means_over_ranks(prepare: Prepare) -> list[torch.Tensor]:
    """All ranks of the plain model have the same rows, hence the same mean."""
    return trained(prepare, lambda model: model(ROWS), Centred)


class Forces(nn.Module):
    """Energies, and a loss with their derivatives by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 1))

    def energies(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[:, 0]

    def total(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        energies = self.energies(x)
        return energies.sum(), energies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forces, (_, energies) = torch.func.grad_and_value(self.total, has_aux=True)(x)
        return energies.square().mean() + (forces - 1).square().mean()


class Pulled(Forces):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energies, pull = torch.func.vjp(self.energies, x)
        (forces,) = pull(torch.ones_like(energies))
        return energies.square().mean() + (forces - 1).square().mean()


class Pushed(Net):
    """Directional derivatives, as in mean flows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, slope = torch.func.jvp(lambda y: self.down(torch.tanh(self.up(y))), (x,), (x.cos(),))
        return (found - slope).square().mean()


def derivatives_by_inputs(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS), Forces) + trained(prepare, lambda model: model(ROWS), Pulled)


def derivatives_along(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS), Pushed)


class Sparse(Net):
    """A layer of a graph network with a sparse adjacency matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(torch.spmm(x, self.up.weight.t()))).square().mean()


def sparse_inputs(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS.relu().to_sparse()), Sparse)


KINDS = (means_over_ranks, derivatives_by_inputs, derivatives_along, sparse_inputs)
CASES: dict[int, dict[str, Callable[[], Any]]] = {2: in_presets(*KINDS)}
