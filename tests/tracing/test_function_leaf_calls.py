"""Which calls of a function are leaves, and how what they ask for is told."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.leaf_calls import LeafCall
from autopar.tracing import TraceError, trace


def spread(values: torch.Tensor, index: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """As in PyTorch Geometric: without the number of rows, the index tells it."""
    rows = int(index.max()) + 1 if rows is None else rows
    return values.new_zeros(rows, values.shape[1]).index_add(0, index, values)


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(Messages())

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return spread(self.layer((x, edges)), batch).square().mean()


class Messages(nn.Module):
    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, edges = given
        return spread(x[edges[0]], edges[1], x.shape[0])


def test_a_function_is_a_leaf_only_where_it_asks_for_data() -> None:
    """Layers that call it with sizes are traced, and what it asks for is told with the line of the user's call."""
    given = {"x": torch.randn(6, 4), "edges": torch.randint(0, 6, (2, 9)), "batch": torch.arange(6) // 2}
    traced = trace(Graphs(), given, unsupported="leaf")
    [leaf] = [node.target for node in traced.graph.nodes if isinstance(node.target, LeafCall)]
    assert traced.find("index_add")
    assert leaf.path == "spread"
    assert "give 'batch' a known example (autopar.known)" in leaf.reason


def test_the_callers_line_is_told_with_that_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages" / "counting_library.py"
    library.parent.mkdir()
    library.write_text("def rows(index):\n    return int(index.max())\n")
    monkeypatch.syspath_prepend(library.parent)
    rows = importlib.import_module("counting_library").rows
    with pytest.raises(TraceError, match=rf"{library.name}:2, called at .*{Path(__file__).name}:\d+\]"):
        trace(lambda index: index[: rows(index)], {"index": torch.arange(4)})
