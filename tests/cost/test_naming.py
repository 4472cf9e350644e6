"""Ranges of a graph are named after the user's modules."""

from __future__ import annotations

import torch
from torch import fx, nn

from autopar.cost.structure.naming import stretch_name
from autopar.tracing import trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.stem = nn.Linear(4, 4)
        self.body.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body.stem(x)
        for block in self.body.h:
            x = block(x)
        return self.head(x).sum()


def _between(first: str, last: str) -> list[fx.Node]:
    """The nodes from the first op inside module `first` to the last op in module `last`."""
    nodes = list(trace(Model(), {"x": torch.empty(2, 4)}).graph.nodes)
    paths = [[path for path, _ in node.meta.get("scope", ())] for node in nodes]
    begin = next(i for i, p in enumerate(paths) if first in p)
    end = max(i for i, p in enumerate(paths) if last in p) if last else len(nodes) - 1
    return nodes[begin : end + 1]


def test_a_block_is_its_module() -> None:
    assert stretch_name(_between("body.h.1", "body.h.1")) == "body.h.1"


def test_other_stretches_are_from_first_to_last() -> None:
    assert stretch_name(_between("head", "head")) == "head"
    assert stretch_name(_between("body.h.0", "body.h.1")) == "body.h.0.norm to body.h.1.linear"
    assert stretch_name(_between("body.stem", "body.h.1.norm")) == "body.stem to body.h.1.norm"
    assert stretch_name(_between("head", "")) == "head to sum"


def test_what_holds_no_op() -> None:
    nodes = _between("body.stem", "body.stem")
    assert stretch_name([node for node in nodes[0].graph.nodes if node.op == "placeholder"]) == "inputs and parameters"
