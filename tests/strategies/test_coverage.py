"""The coverage report of a model: which ops have rules, and which indices they are split on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.graph import target_name
from autopar.strategies import NoRuleWarning
from autopar.strategies.coverage import Coverage, coverage
from autopar.tracing import trace


class Block(nn.Module):
    """Splits features into heads, multiplies, and runs an op without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).view(4, 6, 4, 4).transpose(1, 2)
        return torch.cummax(h @ h.transpose(-1, -2), -1).values.sum()


def test_indices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(Block(), {"x": torch.zeros(4, 6, 8)}).graph
    monkeypatch.setenv("AUTOPAR_DISCOVERY", "0")
    with pytest.warns(NoRuleWarning, match="cummax"):
        found = coverage(graph, (2,))
    found = {target_name(node).rpartition(".")[2]: how for node, how in found.items()}
    assert found["linear"] == Coverage("rule", frozenset({"batch", "sequence", "inner"}))
    assert found["matmul"].kinds == {"batch", "sequence", "inner"}
    assert found["cummax"] == Coverage("none", frozenset())


def test_discovered_ops_are_told_apart() -> None:
    graph = trace(Block(), {"x": torch.zeros(4, 6, 8)}).graph
    found = {target_name(node).rpartition(".")[2]: how for node, how in coverage(graph, (2,)).items()}
    assert found["cummax"].source == "discovered"
    assert "batch" in found["cummax"].kinds
