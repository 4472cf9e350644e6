"""Constants that affect neither cost nor sharding: calls that differ in these alone count as the same call."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.cost import annotate
from autopar.cost.structure.blocks import find_repeats
from autopar.graph import COST, KIND
from autopar.strategies import strategies_for
from autopar.tracing import trace

Call = Callable[[torch.Tensor, float], torch.Tensor]
CALLS: dict[str, Call] = {
    "mul": lambda x, c: x * c,
    "mul_": lambda x, c: (x + x).mul_(c),
    "rmul": lambda x, c: c * x,
    "div": lambda x, c: torch.div(x, c),
    "truediv": lambda x, c: x / c,
    "add": lambda x, c: x + c,
    "alpha": lambda x, c: torch.add(x, x, alpha=c),
    "sub": lambda x, c: x - c,
    "rsub": lambda x, c: torch.rsub(x, c),
    "dropout": lambda x, c: F.dropout(x, c),
    "bernoulli": lambda x, c: x.new_empty(4, 1, 1).bernoulli_(c) * x,
    "attention": lambda x, c: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=c)[0],
    "entry": lambda x, c: x[:, int(4 * c)],
    "last entry": lambda x, c: x[..., int(4 * c)],
    "first entry": lambda x, c: x[int(4 * c)],
}


class One(nn.Module):
    """One call between two ops that read a parameter."""

    def __init__(self, call: Call, *constants: float) -> None:
        super().__init__()
        self.call, self.constants, self.scale = call, constants, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return sum((self.call(x, c) for c in self.constants), start=torch.zeros(()))


def _annotated(call: Call, *constants: float) -> fx.Graph:
    graph = trace(One(call, *constants), {"x": torch.empty(4, 4, 4, device="meta")}).graph
    annotate(graph)
    return graph


@pytest.mark.parametrize("name", CALLS)
def test_calls_taken_for_the_same_cost_the_same_and_are_split_in_the_same_ways(name: str) -> None:
    """Each call in a graph of its own, so that no result of one is reused for the other."""
    one, other = (_annotated(CALLS[name], c) for c in (0.25, 0.75))
    assert [node.meta[COST] for node in one.nodes] == [node.meta[COST] for node in other.nodes]
    ways, others = (strategies_for(graph, (2, 2)) for graph in (one, other))
    assert [tuple(w) for w in ways.values()] == [tuple(w) for w in others.values()]
    assert _kinds(_annotated(CALLS[name], 0.25, 0.75)) == _kinds(_annotated(CALLS[name], 0.25, 0.25))


def _kinds(graph: fx.Graph) -> int:
    return len({node.meta[KIND] for node in graph.nodes if KIND in node.meta})


@pytest.mark.parametrize(("a", "b"), [(0.5, -0.5), (0.5, 0.0), (0.5, 1.0), (0.5, float("inf"))])
def test_factors_that_decide_are_told_apart(a: float, b: float) -> None:
    assert _kinds(_annotated(CALLS["mul"], a, b)) == _kinds(_annotated(CALLS["mul"], a, a)) + 1


class Deep(nn.Module):
    """Each block takes its own entry of a tensor, scales by its depth, and has a dropout rate that grows with depth."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
        for i, linear in enumerate(self.inner):
            x = x + F.dropout(linear(x) / (i + 1.5), 0.1 + 0.05 * i) * each[:, i]
        return x


def test_blocks_that_differ_in_such_constants_are_equal() -> None:
    inputs = {"x": torch.empty(4, 8, device="meta"), "each": torch.empty(4, 6, 8, device="meta")}
    graph = trace(Deep(6), inputs).graph
    annotate(graph)
    assert [repeat.count for repeat in find_repeats(graph)] == [6]
