"""Experts with their own loop: one op that does the work of its routes, split on tokens; split equals whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.cost.ops.annotation import annotate
from autopar.graph import target_name
from autopar.strategies import strategies_for
from autopar.strategies.check import check
from autopar.strategies.examples import example
from autopar.tracing import Traced, trace

IDS = torch.arange(24).view(4, 6) % 30 + 1


def switch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A dict of modules; routes are given as a mask."""
    config = transformers.SwitchTransformersConfig(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, num_heads=4, num_experts=4, vocab_size=32, dropout_rate=0.0,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config), {
        "input_ids": IDS,
        "decoder_input_ids": IDS,
        "labels": IDS,
    }


def longcat() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Stacked parameters, and some experts that return their input."""
    config = transformers.LongcatFlashConfig(
        hidden_size=16, num_layers=1, num_attention_heads=4, vocab_size=32, ffn_hidden_size=32,
        expert_ffn_hidden_size=8, n_routed_experts=4, zero_expert_num=2, moe_topk=2, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, head_dim=4,
    )  # fmt: skip
    return transformers.LongcatFlashForCausalLM(config), {"input_ids": IDS, "labels": IDS}


MODELS = {"switch": switch, "longcat": longcat}


def traced(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], Traced]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model, inputs, trace(model, inputs, unsupported="leaf")


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_does_what_the_model_does(name: str) -> None:
    model, inputs, found = traced(name)
    assert not [n for n in found.graph.nodes if n.op == "call_module"]
    assert [n for n in found.graph.nodes if target_name(n).endswith("routed")]
    expected = model(**inputs).loss
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    loss = found.gm(*found.bind(kwargs=inputs)).loss
    assert torch.equal(loss, expected)
    for mine, theirs in zip(
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), gradients, strict=True
    ):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", MODELS)
def test_split_on_tokens_is_whole(name: str, ranks: Any) -> None:
    *_, found = traced(name)
    node = next(n for n in found.graph.nodes if target_name(n).endswith("routed"))
    generator = torch.Generator().manual_seed(1)
    metas = [source.meta["val"] for source in node.args]
    given = [torch.randn(m.shape, generator=generator, dtype=torch.float64).div(4).requires_grad_() for m in metas]
    experts = torch.randint(0, 4, metas[2].shape, generator=generator)
    given[1] = nn.functional.one_hot(experts, 4) if metas[1].ndim == 3 else experts
    alone, tensors = example(node.target, *given)
    assert check(alone, tensors, (2,), ranks=ranks) >= 1
    ways = {tuple(map(str, s.inputs[:3])) for s in strategies_for(found.graph, (2,))[node]}
    assert {("R",) * 3, ("S0",) * 3} <= ways


def test_work_is_that_of_the_routes() -> None:
    *_, found = traced("longcat")
    annotate(found.graph)
    node = next(n for n in found.graph.nodes if target_name(n).endswith("routed"))
    routes, width, inner = 4 * 6 * 2, 16, 8
    assert node.meta["cost"].flops_forward == 2 * routes * 3 * width * inner


def test_other_modules_stay_leaves() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, hidden, routes, weights):
            rows = (routes[:, 0] > 0).nonzero().flatten()
            return hidden.index_add(0, rows, self.first(hidden[rows]).sort(0)[0] * weights[rows, :1])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picking = Picking()

        def forward(self, x):
            return self.picking(x, x[:, :2].long(), x[:, :2])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trace(Model(), dict(x=torch.randn(6, 4)), unsupported="leaf")
    assert [n.target for n in found.graph.nodes if n.op == "call_module"] == ["picking"]
