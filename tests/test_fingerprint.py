"""The digest of a graph differs between graphs with different computations, and is independent of node names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cost import annotate
from autopar.fingerprints.fingerprint import fingerprint
from autopar.tracing import trace

CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, y, w: x + y,
    "the other way round": lambda x, y, w: y + x,
    "one twice": lambda x, y, w: x + x,
    "with alpha 1": lambda x, y, w: torch.add(x, y, alpha=1),
    "with alpha 1.0": lambda x, y, w: torch.add(x, y, alpha=1.0),
    "with alpha 2": lambda x, y, w: torch.add(x, y, alpha=2),
    "times 0.0": lambda x, y, w: x * 0.0,
    "times -0.0": lambda x, y, w: x * -0.0,
    "times 1": lambda x, y, w: x * 1,
    "times True": lambda x, y, w: x * True,
    "times 0.3": lambda x, y, w: x * 0.3,
    "times a parameter": lambda x, y, w: x * w.one,
    "times another": lambda x, y, w: x * w.other,
    "first": lambda x, y, w: x[0],
    "second": lambda x, y, w: x[1],
    "first of both": lambda x, y, w: (x[0], y[0]),
    "first of both, swapped": lambda x, y, w: (y[0], x[0]),
    "joined": lambda x, y, w: torch.cat([x, y]),
    "joined as a pair": lambda x, y, w: torch.cat((x, y)),
    "joined with itself": lambda x, y, w: torch.cat([x, x]),
    "in halves": lambda x, y, w: x.to(torch.float16),
    "in doubles": lambda x, y, w: x.to(torch.float64),
    "without a gradient": lambda x, y, w: x.detach() * w.one,
    "sum": lambda x, y, w: x.sum(0),
    "mean": lambda x, y, w: x.mean(0),
}


class Model(nn.Module):
    """A model that makes one call on two inputs."""

    def __init__(self, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.call, self.one, self.other = call, nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.call(x, y, self)


def _traced(name: str) -> Any:
    examples = {name: torch.empty(4, 4, device="meta") for name in ("x", "y")}
    return trace(Model(CALLS[name]), examples)


def test_graphs_that_differ_have_different_digests() -> None:
    digests = {name: fingerprint(_traced(name).graph) for name in CALLS}
    same = [(a, b) for a in digests for b in digests if a < b and digests[a] == digests[b]]
    assert same == []


@pytest.mark.parametrize("name", CALLS)
def test_neither_names_nor_annotation_count(name: str) -> None:
    traced = _traced(name)
    before = fingerprint(traced.graph)
    annotate(traced.graph, "cuda", root=traced.root)
    for i, node in enumerate(traced.graph.nodes):
        node.name = f"n{i}"
    assert fingerprint(traced.graph) == before == fingerprint(_traced(name).graph)
