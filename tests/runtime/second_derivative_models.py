"""Models whose gradients are differentiated again: by the loop, or in their forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Critic(nn.Module):
    """Equal blocks, and a maximum and a sum over features, so that every kind of collective occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        wide = self.blocks[0][0](x)
        return self.head(self.norm(x)) + wide.logsumexp(1, keepdim=True) + wide.tanh().amax(1, keepdim=True)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
        self.out, self.head = nn.Linear(8, 4), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 4, 4)
        query, key, value = (
            part(rows).view(-1, 4, 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = torch.softmax(query @ key.transpose(-1, -2) / 2, -1) @ value
        return self.head((rows + self.out(mixed.transpose(1, 2).reshape(-1, 4, 8))).flatten(1))


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x.view(-1, 2, 8)))
        return self.head(F.softplus(self.second(hidden)).flatten(1))


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class Forces(Energy):
    """Energies of four points by their distances, and forces; the loss contains both."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.requires_grad_(True)
        points = x.view(-1, 4, 4)
        apart = (points[:, :, None] - points[:, None]).square().sum(-1)
        energy = self.net(torch.exp(-apart).flatten(1))
        (slope,) = torch.autograd.grad([energy], [x], grad_outputs=[torch.ones_like(energy)], create_graph=True)
        return energy.square().mean() + (slope + target).square().mean(), -slope


class Laplacian(Energy):
    """The residual of a differential equation in second derivatives, so that training needs third derivatives."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.requires_grad_(True)
        value = self.net(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return (second[0] + second[1] + value[:, 0] - target[:, 0]).square().mean(), slope


class Pushed(Energy):
    """A descent step on its own energy, by a tensor that forward makes; its earlier readers are not involved."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = x.detach() * 2
        beside = self.net(start)
        start.requires_grad_()
        energy = self.net(start).sum() + beside.sum()
        (slope,) = torch.autograd.grad(energy, start, create_graph=True)
        (between,) = torch.autograd.grad(slope.square().sum(), self._hidden(start), allow_unused=True)
        assert between is None
        return (start - slope - target).square().mean(), slope

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.net[0](x)


class Molecules(nn.Module):
    """Energies of molecules and forces on atoms, from a dict of positions and edges, also under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.by_distance, self.mix = nn.Embedding(10, 16), nn.Linear(8, 16), nn.Linear(16, 16)
        self.out = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        atoms, others = batch["edges"]
        with torch.enable_grad():
            positions = batch["positions"].requires_grad_()
            apart = (positions[atoms] - positions[others]).norm(dim=-1, keepdim=True)
            weights = self.by_distance(torch.exp(-(apart - torch.arange(8)).square()))
            hidden = self.kinds(batch["kinds"])
            for mix in (nn.Identity(), self.mix):
                hidden = hidden + torch.zeros_like(hidden).index_add(0, atoms, mix(hidden)[others] * weights)
            of_atoms = self.out(hidden).squeeze(-1)
            energies = of_atoms.new_zeros(4).index_add(0, batch["molecules"], of_atoms)
            (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=self.training)
        return {"energies": energies, "forces": -slope}


BY_THE_LOOP = {one.__name__: one for one in (Critic, Attending, Convolving)}
BY_FORWARD = {one.__name__: one for one in (Forces, Laplacian, Pushed)}
