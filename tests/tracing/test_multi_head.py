"""Multi-head attention is traced as eager's ops, which split on heads, with and without dropout."""

from __future__ import annotations

import pytest
import torch
from eager_path import EagerCalls, difference, graph_calls
from torch import nn

from autopar.graph import target_name
from autopar.strategies import strategies_for
from autopar.tracing import trace


class Attending(nn.Module):
    def __init__(self, *, need_weights: bool, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, **options)  # type: ignore[arg-type]
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor, y: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        found, weights = self.attention(x, y, y, key_padding_mask=padding, need_weights=self.need_weights)
        return (found * 2).square().sum() if weights is None else found.sum() + weights.square().sum()


CASES = {
    "": Attending(need_weights=False),
    "weights": Attending(need_weights=True),
    "dropout": Attending(need_weights=False, dropout=0.2),
    "weights-dropout": Attending(need_weights=True, dropout=0.2),
    "bias": Attending(need_weights=False, add_bias_kv=True, add_zero_attn=True),
    "separate": Attending(need_weights=True, kdim=32, vdim=32, batch_first=True),
}
INPUTS = {"x": torch.randn(8, 8, 32), "y": torch.randn(8, 8, 32), "padding": torch.rand(8, 8) < 0.2}


@pytest.mark.parametrize("name", CASES)
def test_its_ops_are_eagers_and_run_alike(name: str) -> None:
    model = CASES[name]
    traced = trace(model, INPUTS, bias_addition_split=False, remove_inplace=False)
    with EagerCalls() as eager:
        output = model(**INPUTS)
    assert difference(eager.live(output), graph_calls(traced.graph)) == ""
    assert not traced.find("multi_head_attention_forward")
    results = []
    for call in (model, traced.gm):
        torch.manual_seed(0)
        results.append(call(*INPUTS.values()))
    assert torch.equal(*results)


class SequenceFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(8, 8, 4, 8).permute(1, 2, 0, 3)
        found = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return found.permute(2, 0, 1, 3).contiguous().view(8, 8, 32).square().sum()


def test_a_query_with_its_sequence_first_gives_its_layout_to_the_output() -> None:
    traced = trace(SequenceFirst(), {"x": INPUTS["x"]}, remove_inplace=False)
    with EagerCalls() as eager:
        output = SequenceFirst()(INPUTS["x"])
    assert difference(eager.live(output), graph_calls(traced.graph)) == ""
    assert not traced.find("contiguous")


@pytest.mark.parametrize("name", ["dropout", "weights-dropout"])
def test_every_product_splits_on_batch_and_heads(name: str) -> None:
    graph = trace(CASES[name], INPUTS).graph
    found = strategies_for(graph, (2,))
    products = [n for n in graph.nodes if target_name(n).rpartition(".")[2] in ("linear", "bmm", "dropout")]
    products += [n for n in graph.nodes if "scaled_dot_product" in target_name(n)]
    assert len(products) >= 4
    assert all(len(found[n]) >= 3 for n in products), "whole, on the batch, on heads"
