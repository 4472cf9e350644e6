"""Products with a transposed weight are linear layers in the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.cost import annotate, saved_bytes
from autopar.tracing import trace

WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "T": lambda x, weight: x @ weight.T,
    "t()": lambda x, weight: torch.matmul(x, weight.t()),
    "mT": lambda x, weight: x.matmul(weight.mT),
    "transpose": lambda x, weight: torch.mm(x.flatten(0, 1), weight.transpose(0, 1)),
    "permute": lambda x, weight: x @ weight.permute(1, 0),
}
OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "not transposed": lambda x, weight: x @ weight,
    "first factor": lambda x, weight: weight.T @ x,
    "transposed twice": lambda x, weight: x @ weight.T.T,
    "computed": lambda x, weight: x @ (weight * 2).T,
    "of a part": lambda x, weight: x @ weight[:8].T,
}


class Product(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.of = nn.Parameter(torch.randn(16, 16)), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(x, self.weight).square().sum()


def targets(model: nn.Module) -> set[object]:
    return {node.target for node in trace(model, {"x": torch.randn(2, 16, 16)}, remove_inplace=True).graph.nodes}


@pytest.mark.parametrize("way", WAYS)
def test_the_weight_is_kept_and_no_transposed_one(way: str) -> None:
    model, x = Product(WAYS[way]), torch.randn(2, 16, 16)
    traced = trace(model, {"x": x}, remove_inplace=True)
    assert torch.nn.functional.linear in {node.target for node in traced.graph.nodes}
    annotate(traced.graph, root=model)
    assert saved_bytes(traced.graph) == 2 * 16 * 16 * 4, "what is squared, beside the input and the weight"
    run = torch.fx.GraphModule(model, traced.graph)
    assert torch.equal(run(x)[0], model(x))


@pytest.mark.parametrize("way", OTHERS)
def test_others_stay(way: str) -> None:
    assert torch.nn.functional.linear not in targets(Product(OTHERS[way]))
