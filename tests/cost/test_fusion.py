"""Memory traffic of a compiled graph: a fused chain reads and writes once, matrix products are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import graph_of
from torch import fx, nn

from autopar.cost import annotate
from autopar.graph import COST

SHAPE = (64, 32)
BYTES = 64 * 32 * 4


class Chain(nn.Module):
    """A product, five pointwise ops and a norm, then another product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(32, 32)), nn.Parameter(torch.empty(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.up
        z = torch.tanh(y) * 2 + y
        return F.layer_norm(torch.exp(z).view(64, 4, 8).reshape(64, 32), (32,)) @ self.down


def costs(compiled: bool, device: str = "cuda") -> tuple[fx.Graph, dict[str, Any]]:
    graph = graph_of(Chain(), SHAPE)
    annotate(graph, device, compiled=compiled)
    return graph, {node.name: node.meta[COST] for node in graph.nodes}


def test_a_chain_reads_what_comes_in_and_writes_what_goes_out() -> None:
    _, found = costs(compiled=True)
    chain = ["tanh", "mul", "add", "exp", "layer_norm"]
    read = {name: sum(found[name].work.read_bytes) for name in chain}
    written = {name: found[name].moved_bytes_forward - read[name] for name in chain}
    assert [written[name] for name in chain] == [0, 0, 0, 0, BYTES]
    assert read == {"tanh": BYTES, "mul": 0, "add": BYTES, "exp": 0, "layer_norm": 0}
    assert [found[name].work.kernels_forward for name in chain] == [0, 0, 0, 0, 1]


def test_nothing_else_changes() -> None:
    (_, eager), (_, compiled) = costs(compiled=False), costs(compiled=True)
    for name, cost in eager.items():
        assert (cost.flops_forward, cost.flops_backward) == (
            compiled[name].flops_forward,
            compiled[name].flops_backward,
        )
        assert (cost.saved_inputs, cost.saved_internal_bytes) == (
            compiled[name].saved_inputs,
            compiled[name].saved_internal_bytes,
        )
        assert compiled[name].moved_bytes_forward <= cost.moved_bytes_forward
        assert compiled[name].moved_bytes_backward <= cost.moved_bytes_backward
        if cost.flops_forward:
            assert compiled[name] == cost


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_backward_reads_the_gradient_and_what_was_kept(device: str) -> None:
    """The chain has two external inputs (both the product's result) and one output: backward reads the gradient of the
    output and writes those of the inputs."""
    _, found = costs(compiled=True, device=device)
    assert found["layer_norm"].moved_bytes_backward == BYTES
    assert found["exp"].moved_bytes_backward == 0
    assert found["mul"].moved_bytes_backward == 0
    assert found["tanh"].moved_bytes_backward in (2 * BYTES, BYTES)


def test_what_is_looked_up_is_no_part_of_a_chain() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(100, 32))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.relu(F.embedding(ids, self.table))

    graph = graph_of(Lookup(), torch.zeros(8, dtype=torch.long))
    annotate(graph, "cuda", compiled=True)
    relu = next(node for node in graph.nodes if node.name == "relu")
    assert sum(relu.meta[COST].work.read_bytes) == 8 * 32 * 4
