"""What ops save besides inputs and outputs on one of several devices: not always its share of the work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from recorded import counted_saved_bytes, graph_of_call

from autopar.cost import annotate
from autopar.cost.memory.local_workspace import kept_bytes, of_sharded_rows_bytes, workspace_bytes
from autopar.graph import COST
from autopar.layout import Layout
from autopar.strategies import strategies_for
from autopar.tracing import trace


@pytest.mark.parametrize(("of_input", "of_weight", "part"), [("S0", "R+", 2), ("R+", "S0", 1)])
def test_a_copy_of_an_input_is_cut_as_the_input(of_input: str, of_weight: str, part: int) -> None:
    """A product of a transposed tensor saves a contiguous copy: the whole of it where output features are split."""
    x = torch.empty(8, 64, 16, device="meta").transpose(1, 2).requires_grad_()
    weight = torch.empty(32, 64, device="meta", requires_grad=True)
    node = graph_of_call(F.linear, x, weight)
    annotate(node.graph)
    cost = node.meta[COST]
    real = torch.ones(8, 64, 16).transpose(1, 2).requires_grad_(), torch.ones(32, 64, requires_grad=True)
    assert cost.saved_copies == ((0, cost.saved_internal_bytes),)
    assert cost.saved_internal_bytes == counted_saved_bytes(lambda: F.linear(*real), real)
    layouts = Layout.parse(of_input), Layout.parse(of_weight)
    (strategy,) = (s for s in strategies_for(node.graph, (2,))[node] if s.inputs == layouts)
    assert strategy.work == 0.5
    assert kept_bytes(node, strategy, (2,), cost.saved_internal_bytes) == cost.saved_internal_bytes // part


@pytest.mark.parametrize("of_weight", ["S0", "S1"])
def test_an_embedding_with_sharded_rows_keeps_its_ids_and_which_are_others(of_weight: str) -> None:
    ids, weight = torch.zeros(8, 4, dtype=torch.long), torch.empty(64, 16, device="meta", requires_grad=True)
    node = graph_of_call(F.embedding, ids.to("meta"), weight)
    annotate(node.graph)
    layouts = Layout.parse("R"), Layout.parse(of_weight)
    (strategy,) = (s for s in strategies_for(node.graph, (2,))[node] if s.inputs == layouts)
    kept = kept_bytes(node, strategy, (2,), of_sharded_rows_bytes(node))
    assert kept == (ids.numel() * (8 + 1) if of_weight == "S0" else 0)


def test_each_rank_of_experts_has_room_for_every_route() -> None:
    """Where each expert is split, the rows that its first product reads, and its results, are whole."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    ids = torch.arange(16).view(2, 8)
    traced = trace(transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})
    annotate(traced.graph, root=traced.root)
    options = strategies_for(traced.graph, (2,))
    node = next(n for n in traced.graph.nodes if any(s.local == "experts" for s in options.get(n, ())))
    cost = node.meta[COST]
    assert cost.saved_internal_bytes
    assert cost.workspace_forward_bytes
    whole = 2 * (ids.numel() * config.num_experts_per_tok * config.hidden_size * 4)
    assert any(strategy.factors == ("f",) for strategy in options[node])
    for strategy in options[node]:
        part = 1.0 if strategy.local == "experts" else strategy.work
        kept = kept_bytes(node, strategy, (2,), cost.saved_internal_bytes)
        split = cost.saved_internal_bytes - (whole if strategy.factors == ("f",) else 0)
        assert kept == pytest.approx(split * part + cost.saved_internal_bytes - split, rel=0.01), strategy
        passing = workspace_bytes(node, strategy, (2,), backward=False)
        assert passing == pytest.approx(cost.workspace_forward_bytes * part, rel=0.01), strategy
