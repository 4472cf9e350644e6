"""Equal constants made at the same point are one node; those that could be told apart stay separate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.cost.structure.blocks import find_repeats
from autopar.tracing import trace

Tensor = torch.Tensor


class Recurrent(nn.Module):
    """Layers whose initial states are all made before the first layer runs."""

    def __init__(self, make: Callable[..., Tensor] = torch.zeros, layers: int = 4) -> None:
        super().__init__()
        self.make, self.layers = make, nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        states = [self.make(len(x), 6) for _ in self.layers]
        for layer, state in zip(self.layers, states, strict=True):
            x = x + torch.tanh(layer(x) + state * 2)
        return x


def constants_of(model: nn.Module, x: Tensor, **options: Any) -> int:
    graph = trace(model, {"x": x}, **options).graph
    return sum(node.target in (torch.zeros, torch.ones, torch.rand) for node in graph.nodes)


def test_layers_with_first_states_of_their_own_are_equal_blocks() -> None:
    traced = trace(Recurrent(), {"x": torch.rand(3, 6)})
    (repeat,) = find_repeats(traced.graph)
    assert repeat.count == 4
    assert constants_of(Recurrent(), torch.rand(3, 6)) == 1


def test_the_graph_computes_what_the_model_does() -> None:
    model, x = Recurrent(torch.ones), torch.rand(3, 6)
    assert torch.equal(trace(model, {"x": x}).gm(x=x), model(x))


def test_random_tensors_stay_apart() -> None:
    assert constants_of(Recurrent(torch.rand), torch.rand(3, 6)) == 4


def test_constants_of_later_moments_stay_apart() -> None:
    """As one tensor they would be alive from the first layer to the last."""

    class Later(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x.sin() * torch.ones(len(x), 6)
            return x

    assert constants_of(Later(), torch.rand(3, 6)) == 3


def test_tensors_handed_out_stay_apart() -> None:
    class Handed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first, second = torch.zeros(3), torch.zeros(3)
            return x * 2, first, second

    x = torch.rand(3, 6)
    _, first, second = trace(Handed(), {"x": x}).gm(x=x)
    first += 1
    assert torch.equal(second, torch.zeros(3))


def test_a_constant_written_in_place_stays_apart() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = torch.zeros(3, 6), torch.zeros(3, 6)
            first += x
            return first + second

    x = torch.rand(3, 6)
    for remove in (True, False):
        assert torch.equal(trace(Written(), {"x": x}, remove_inplace=remove).gm(x=x), x)
