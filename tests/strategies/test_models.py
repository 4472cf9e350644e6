"""Traced models: every op has a rule, can be split, and does what its strategies say with its own arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from models import CASES, batch, build
from torch import fx

from autopar.graph import TensorRef, output_tensors, resolve, target_name, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.strategies import Strategy, only_replicated, strategies_for
from autopar.strategies.arguments import value
from autopar.strategies.check import check_strategy
from autopar.strategies.constant import constants
from autopar.strategies.examples import example
from autopar.tracing import trace


@cache
def graph_of(name: str) -> fx.Graph:
    case = CASES[name]
    model = build(name, torch.float64)
    return trace(model, batch(name, 0, torch.float64), case.concrete, loss_fn=case.loss_fn).graph


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_but_inputs_and_constants_can_be_split(name: str, mesh_shape: tuple[int, ...]) -> None:
    graph = graph_of(name)
    strategies = strategies_for(graph, mesh_shape)  # a missing rule would cause a warning, which is an error in tests
    fixed = constants(graph)
    whole = [n for n in only_replicated(strategies) if n not in fixed and n.op != "placeholder"]
    # ops on scalars have no dims to split, and only pass on partial values
    assert [n for n in whole if max(t.numel() for t in output_tensors(n)) > 1] == []


@pytest.mark.parametrize("name", CASES)
def test_strategies_are_well_formed(name: str) -> None:
    graph, mesh_shape = graph_of(name), (2, 2)
    for node, ways in strategies_for(graph, mesh_shape).items():
        first = ways[0]
        assert all(layout.is_replicated for layout in first.inputs + first.outputs)
        assert len({(s.inputs, s.outputs) for s in ways}) == len(ways)
        inputs, outputs = [tensor_of(ref) for ref in tensor_inputs(node)], output_tensors(node)
        for way in ways:
            for tensors, layouts in ((inputs, way.inputs), (outputs if node.op != "output" else [], way.outputs)):
                for tensor, layout in zip(tensors, layouts, strict=True):
                    assert layout.is_legal(tensor.shape, mesh_shape)
                    assert tensor.requires_grad or not any(p.partial_grad for p in layout.placements)
            assert 0 < way.work <= 1


@pytest.mark.parametrize("name", CASES)
def test_each_op_does_what_its_strategies_say(name: str, ranks: Any) -> None:
    graph, mesh_shape = graph_of(name), (2, 2)
    seen: set[tuple[str, int]] = set()
    for node, ways in strategies_for(graph, mesh_shape).items():
        if node.op in ("placeholder", "get_attr", "output") or (target_name(node), id(ways)) in seen:
            continue
        seen.add((target_name(node), id(ways)))
        alone, tensors = _with_real_tensors(node)
        for way in ways[1 :: max(1, len(ways) // 12)]:
            check_strategy(alone, tensors, way, mesh_shape, ranks=ranks)


def _with_real_tensors(node: fx.Node) -> tuple[fx.Node, list[torch.Tensor]]:
    """The op on random tensors of its shapes; integers are 0 or 1, valid indices of every table here."""
    generator = torch.Generator().manual_seed(0)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.1
            return drawn.requires_grad_(tensor.requires_grad)
        return torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype)

    filled = torch.utils._pytree.tree_map_only(torch.Tensor, real, value((node.args, node.kwargs)))
    target = str(node.target) if node.op == "call_method" else node.target
    return example(target, *filled[0], **filled[1])


def _back(
    ref: TensorRef, layout: Layout, strategies: dict[fx.Node, tuple[Strategy, ...]]
) -> Iterator[tuple[fx.Node, Strategy]]:
    """The ops and strategies that give a tensor `layout` without conversions, following the largest inputs backward."""
    node, index = ref
    for way in strategies[node]:
        if way.outputs[index] == layout:
            yield node, way
            if way.inputs:
                refs = tensor_inputs(node)
                largest = max(range(len(refs)), key=lambda i: tensor_of(refs[i]).numel())
                yield from _back(refs[largest], way.inputs[largest], strategies)
            return


def test_heads_of_gpt2_split_through_the_fused_projection() -> None:
    graph = graph_of("gpt2")
    strategies = strategies_for(graph, (2,))
    attention = next(n for n in graph.nodes if "scaled_dot_product" in target_name(n))
    heads = next(s for s in strategies[attention] if s.factors == ("h",))
    for ref, layout in zip(tensor_inputs(attention)[:3], heads.inputs, strict=False):
        made = {target_name(node).rpartition(".")[2]: way for node, way in _back(ref, layout, strategies)}
        assert str(made["mm"].outputs[0]) == "S1@3"
        assert [str(layout) for layout in made["mm"].inputs] == ["R+", "S1@3"]


def test_a_flat_batch_splits_on_samples_or_on_tokens() -> None:
    graph = graph_of("gpt2")
    product = next(n for n in graph.nodes if target_name(n).endswith(".mm"))
    rows = {str(s.inputs[0]) for s in strategies_for(graph, (2,))[product]}
    assert {"S0", "S0@8"} <= rows


def test_key_and_value_heads_that_do_not_divide_stay_whole() -> None:
    ids = torch.zeros(8, 16, dtype=torch.long)  # 8 query heads over 4 key and value heads, no mask
    graph = trace(build("llama", torch.float64), {"input_ids": ids, "labels": ids}).graph
    attention = next(n for n in graph.nodes if "scaled_dot_product" in target_name(n))
    assert {s.factors for s in strategies_for(graph, (8,))[attention]} == {("",), ("b0",), ("q",)}
    assert {s.factors for s in strategies_for(graph, (4,))[attention]} >= {("h",), ("b0",)}
    assert ("g",) in {s.factors for s in strategies_for(graph, (2,))[attention]}


def test_equal_nodes_share_their_strategies() -> None:
    graph = graph_of("llama")
    strategies = strategies_for(graph, (2, 2))
    products = [n for n in graph.nodes if target_name(n).endswith(".linear")]
    assert len(products) == 3 * 7 + 1
    assert len({id(strategies[n]) for n in products}) <= 8
    assert resolve(products[0])[0].node in strategies


def test_outputs_may_stay_as_their_ops_leave_them() -> None:
    graph = graph_of("t5")
    strategies = strategies_for(graph, (2, 2))
    output = next(n for n in graph.nodes if n.op == "output")
    ways = strategies[output]
    shapes = [tuple(tensor_of(ref).shape) for ref in tensor_inputs(output)]
    cached = next(i for i, shape in enumerate(shapes) if len(shape) == 4)
    logits = next(i for i, shape in enumerate(shapes) if shape[-1:] == (96,))
    assert {"S0,S1", "S1,S0", "S0,R"} <= {str(way.inputs[cached]) for way in ways}
    batch_and_own = next(way for way in ways if str(way.inputs[cached]) == "S0,S1")
    assert str(batch_and_own.inputs[logits]) == "S0,S2"
    assert len(ways) <= 64
