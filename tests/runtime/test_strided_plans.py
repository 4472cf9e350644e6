"""`as_strided` reads the same elements under any plan, however the tensor was converted before."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from deviation import deviation
from random_plans import random_plan
from torch import nn

from autopar.strategies.arguments import op_name
from autopar.strategies.ops.views import strided
from autopar.tracing import trace

Tensor = torch.Tensor
X = {"x": torch.rand(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def written(y: Tensor) -> Tensor:
    y = y.view(2, 4, 8).permute(1, 2, 0).relu().permute(2, 0, 1) * 1.0
    y.as_strided((4, 4), (8, 1), 3).mul_(2.0)
    return y


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y.as_strided((3, 4), (16, 1), 3),
    "transposed": lambda y: y.t().as_strided((4, 4), (8, 1)),
    "computed on permuted": lambda y: y.view(2, 4, 8).permute(1, 2, 0).relu().as_strided((4, 4), (8, 1)),
    "windows in rows": lambda y: y.as_strided((8, 3, 4), (8, 2, 1)),
    "windows in rows, further on": lambda y: y.as_strided((8, 3, 3), (8, 2, 1), 1),
    "windows in rows of rows": lambda y: y.view(2, 4, 8).as_strided((2, 4, 3, 4), (32, 8, 2, 1)),
    "windows over rows of rows": lambda y: y.view(2, 4, 8).as_strided((2, 3, 12), (32, 8, 1)),
    "windows over a sequence, of each row": lambda y: y.view(8, 4, 2).as_strided((4, 3, 4, 2), (2, 16, 8, 1)),
    "windows over a sequence, further on": lambda y: y.view(8, 4, 2).as_strided((2, 3, 4), (1, 16, 2), 16),
    "written": written,
}


class Model(nn.Module):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.weight = read, nn.Parameter(torch.rand(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x @ self.weight).tanh().cumsum(0).square().sum()


RULES = {
    "contiguous": "_ _ -> _ _",
    "windows in rows": "a _ -> a _ _",
    "windows in rows, further on": "a _ -> a _ _",
    "windows in rows of rows": "a b _ -> a b _ _",
    "windows over rows of rows": "a _ _ -> a _ _",
    "windows over a sequence, of each row": "_ a b -> a _ _ b",
    "windows over a sequence, further on": "_ a b -> b _ a",
}


@pytest.mark.parametrize("kind", RULES)
def test_dims_before_windows_may_be_split(kind: str) -> None:
    graph = trace(Model(READ[kind]), X).graph
    (node,) = (node for node in graph.nodes if op_name(node) == "as_strided")
    assert strided(node) == f"{RULES[kind]} | linear @strided always"


@pytest.mark.parametrize("kind", READ)
def test_same_elements_under_any_plan(kind: str) -> None:
    for seed in range(10):
        model = Model(READ[kind])
        traced = trace(model, X)
        plan = random_plan(traced.graph, model, (2,), random.Random(seed))
        assert deviation(model, X, traced, plan) < 1e-12
