"""Partial values and gradients are passed on where that saves communication, and nowhere else."""

from __future__ import annotations

import torch
from torch import nn

from autopar.graph import target_name
from autopar.strategies import strategies_for
from autopar.tracing import trace


def modes(model: nn.Module, x: torch.Tensor) -> dict[str, set[str]]:
    """For each node the names of its strategies on a single axis of size two."""
    graph = trace(model, {"x": x}).graph
    found = strategies_for(graph, (2,))
    return {f"{target_name(n).rpartition('.')[2]} {n.name}": {s.factors[0] for s in found[n]} for n in found}


class Parallel(nn.Module):
    """The sum of two products: one reduction serves both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x).view(2, 2, 8) + self.b(torch.relu(x)).view(2, 2, 8)).sum()


class Single(Parallel):
    """A single product, whose reduction is shared with nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x).view(2, 2, 8) * 2).sum()


class Cut(Parallel):
    """Only a part of a product is used, so reducing that part is cheaper."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x).view(2, 2, 8)[:, 0]).sum()


class Grown(Parallel):
    """A weight is cast and an activation expanded: their gradients are best reduced before that is undone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(nn.functional.linear(x, self.a.weight.double().float()))
        h = h.view(4, 1, 8).expand(4, 2, 8).reshape(8, 8)
        return torch.tanh(-h).sum()


class Adapted(Parallel):
    """A low-rank product beside another: its second factor passes on the partial values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x) + self.up(self.down(x))).sum() + torch.tanh(self.a(x) + self.b(self.a(x))).sum()


X = torch.zeros(4, 4, requires_grad=True)


def test_partial_values_pass_to_where_they_meet() -> None:
    found = modes(Parallel(), X)
    assert all("P" in names for node, names in found.items() if node.startswith(("view", "add")))


def test_partial_values_pass_to_where_they_shrink() -> None:
    found = modes(Cut(), X)
    assert all("P" in names for node, names in found.items() if node.startswith(("view", "getitem")))


def test_partial_values_do_not_pass_for_nothing() -> None:
    found = modes(Single(), X)
    assert not any("P" in names for node, names in found.items() if node.startswith(("view", "mul", "linear")))


def test_partial_gradients_pass_to_parameters_and_to_smaller_tensors() -> None:
    found = modes(Grown(), X)
    passing = {node.partition(" ")[0] for node, names in found.items() if "R+" in names}
    assert passing == {"double", "float", "expand", "reshape", "neg"}


def test_partial_values_pass_through_products_of_low_rank_alone() -> None:
    found = modes(Adapted(), torch.zeros(4, 64, requires_grad=True))
    products = [names for node, names in found.items() if node.startswith("linear")]
    assert [("P" in names) for names in products] == [False, False, True, False, False, False]
    assert all("R+" not in names for names in products)
