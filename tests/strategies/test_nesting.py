"""Two axes that split one dim can nest in either order: permuting the mesh's axes gives the same ways to split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import fx, nn

from autopar.layout import Layout
from autopar.strategies import Strategy, strategies_for
from autopar.tracing import trace

Way = tuple[tuple[Layout, ...], tuple[Layout, ...], float, tuple[object, ...]]


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=8, vocab_size=128, n_positions=16, use_cache=False)
    ids = torch.zeros(16, 16, dtype=torch.long, device="meta")
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def pixels() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    layers = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(8))
    layers(torch.zeros(2, 3, 32, 32))
    return layers, {"input": torch.zeros(16, 3, 32, 32, device="meta")}


def turned(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    return tuple(Layout(layout.placements[::-1]) for layout in layouts)


def ways(strategies: tuple[Strategy, ...], *, turn: bool) -> set[Way]:
    """Layouts, work and inner collectives of strategies; `turn`: with the two axes exchanged."""
    found = set()
    for one in strategies:
        inputs, outputs = (turned(one.inputs), turned(one.outputs)) if turn else (one.inputs, one.outputs)
        sent = tuple(sorted(str(replace(s, axis=1 - s.axis) if turn else s) for s in one.inner))
        found.add((inputs, outputs, round(one.work, 9), sent))
    return found


@pytest.mark.parametrize("build", [gpt2, pixels])
def test_the_order_of_axes_is_no_matter(build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
    with torch.device("meta"):
        model, inputs = build()
    graph = trace(model, inputs).graph
    one, other = (strategies_for(graph, mesh_shape) for mesh_shape in ((2, 4), (4, 2)))
    ops = [node for node in one if node.op.startswith("call")]
    assert any(_nested_the_other_way(one[node]) for node in ops)
    for node in ops:
        assert ways(one[node], turn=False) == ways(other[node], turn=True), node


def _nested_the_other_way(strategies: tuple[Strategy, ...]) -> bool:
    return any(
        layout[0].is_sharded and layout[0].dim == layout[1].dim and layout[0].outer == 4 and layout[1].outer == 1
        for strategy in strategies
        for layout in strategy.outputs
    )


def test_three_axes_nest_in_their_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    graph.output(y)
    x.meta["val"] = y.meta["val"] = torch.zeros(16, device="meta")
    [found] = [
        layout for s in strategies_for(graph, (2, 2, 2))[y] for layout in s.outputs if str(layout).count("S") == 3
    ]
    assert str(found) == "S0,S0@2,S0@4"
