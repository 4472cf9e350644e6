"""The experts of a mixture are one op: split on tokens, on experts, or within each expert, the results are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import fx

import autopar
from autopar.cost.ops.annotation import annotate, total_flops
from autopar.graph import target_name
from autopar.strategies import strategies_for
from autopar.strategies.check import check
from autopar.strategies.examples import example
from autopar.tracing import trace
from autopar.tracing.leaves import experts

TINY = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
MODELS: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **TINY, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **TINY, intermediate_size=32, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, head_dim=4
        )
    ),
    "deepseek": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **TINY,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=0,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
        )
    ),
}


def traced(name: str, implementation: str, dtype: torch.dtype, without: Sequence[str] = ()) -> fx.Graph:
    """`without`: attributes that the experts' module lacks, as in older versions of transformers."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    model.set_experts_implementation(implementation)
    for word in without:
        delattr(next(m for m in model.modules() if hasattr(m, word)), word)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 32, (4, 6))
    return trace(model, {"input_ids": ids, "labels": ids}).graph


def experts_of(graph: fx.Graph) -> fx.Node:
    (node,) = (n for n in graph.nodes if target_name(n).endswith("experts"))
    return node


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_whole(name: str, implementation: str, mesh_shape: tuple[int, ...], ranks: Any) -> None:
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # grouped_mm has no float64 kernel
    _splits_equal_whole(experts_of(traced(name, implementation, dtype)), mesh_shape, ranks)


def test_versions_that_leave_out_no_routes(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.17, routes to another rank's experts are given to one of this rank's experts with weight 0."""
    monkeypatch.setattr(experts, "_version", lambda: (5, 8))
    given = []
    run = transformers.integrations.moe.grouped_mm_experts_forward

    def seen(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        given.append((int(index.max()), module.num_experts))
        return run(module, hidden, index, weights)

    seen.__module__ = run.__module__
    monkeypatch.setitem(transformers.integrations.moe.ExpertsInterface._global_mapping, "grouped_mm", seen)
    _splits_equal_whole(experts_of(traced("gpt_oss", "grouped_mm", torch.float32)), (2,), ranks)
    assert any(held == 2 for _, held in given), "no rank had half of the experts"
    assert all(highest < held for highest, held in given)


def test_versions_with_fewer_words(ranks: Any) -> None:
    """As of 5.3, whose experts have no attribute that tells whether they are distributed already."""
    words = ("is_concatenated", "has_post_expert_norm", "_is_expert_parallel")
    node = experts_of(traced("mixtral", "eager", torch.float64, without=words))
    assert node.target.options["is_concatenated"]
    _splits_equal_whole(node, (2,), ranks)


def _splits_equal_whole(node: fx.Node, mesh_shape: tuple[int, ...], ranks: Any) -> None:
    dtype = node.args[0].meta["val"].dtype
    generator = torch.Generator().manual_seed(1)
    _, index, *_ = shapes = [tuple(source.meta["val"].shape) for source in node.args]
    given = [torch.randn(s, generator=generator, dtype=dtype).div(4).requires_grad_() for s in shapes]
    given[1] = torch.rand(index[0], 4, generator=generator).topk(index[1]).indices
    alone, tensors = example(node.target, *given)
    assert check(alone, tensors, mesh_shape, ranks=ranks) > (2 if node.target.options["has_bias"] else 3)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_work_is_that_of_the_routes(implementation: str) -> None:
    graph = traced("mixtral", implementation, torch.float32)
    node = experts_of(graph)
    annotate(graph)
    routes, width, inner = 4 * 6 * 2, 16, 32
    assert node.meta["cost"].flops_forward == 2 * routes * 3 * width * inner
    assert node.meta["cost"].flops_backward == 2 * node.meta["cost"].flops_forward
    assert total_flops(graph)[0] > node.meta["cost"].flops_forward


def test_the_ways_to_split() -> None:
    graph = traced("mixtral", "grouped_mm", torch.float32)
    strategies = strategies_for(graph, (2,))[experts_of(graph)]
    ways = {s.factors[0]: (tuple(map(str, s.inputs)), str(s.outputs[0])) for s in strategies}
    del ways["t@4"]  # the second half of the tokens, split by position instead of by sample
    assert ways == {
        "": (("R",) * 5, "R"),
        "t": (("S0", "S0", "S0", "R+", "R+"), "S0"),
        "e": (("R+", "R", "R+", "S0", "S0"), "P"),
        "t+e": (("S0",) * 5, "S0"),
        "f": (("R+", "R", "R+", "S1@2", "S2"), "P"),
    }


def test_tokens_go_to_their_experts_over_several_axes() -> None:
    graph = traced("mixtral", "grouped_mm", torch.float32)
    strategies = strategies_for(graph, (2, 2))[experts_of(graph)]
    both = [s for s in strategies if s.factors == ("t+e", "t+e")]
    assert {str(s.inputs[3]) for s in both} == {"S0,S0@2", "S0@2,S0"}, "the experts in either order of the axes"
    sent = [[i.forward_bytes for i in both[0].inner if i.axis == axis] for axis in (0, 1)]
    assert sent[0] == sent[1], "as many rows go over the one axis as over the other"
    assert both[0].work == 0.25


def test_experts_lie_on_the_devices_and_the_rest_is_data_parallel() -> None:
    """Known answer A8: tokens are sent to the devices of their experts and back, and no batch is gathered."""
    config = transformers.MixtralConfig(num_hidden_layers=2, use_cache=False)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    ids = torch.empty(64, 1024, dtype=torch.long, device="meta")
    cluster = autopar.Cluster.preset("h100", (8,))
    cluster = replace(cluster, device=replace(cluster.device, overlap=0.0))  # the known answer assumes no overlap
    plan = autopar.plan(model, {"input_ids": ids, "labels": ids}, cluster, precision="bf16")
    factors = {n.target.rpartition(".")[2]: n.factors[0] for n in plan.nodes if n.scope.startswith("model.layers")}
    assert factors["experts"] == "t+e"
    assert factors["linear"] == "...0"
    assert factors["scaled_dot_product_attention"] == "b0"
    assert {str(p.storage) for p in plan.parameters if ".experts." in p.name} == {"S0"}
    sent = 64 * 1024 // 8 * 2 * 4096 * 2  # bytes: the tokens of a device, with two routes each, in bfloat16
    exchanges = dict.fromkeys(("forward", "backward"), 0)
    for collective in plan.collectives:
        if collective.bytes == sent:
            assert collective.kind == "all_to_all"
            exchanges[collective.phase] += collective.count
    assert exchanges == {"forward": 2 * 2, "backward": 2 * 2}, "there and back, in each of two layers"
    assert not [c for c in plan.collectives if c.cause == "activations" and c.kind == "all_gather" and c.bytes >= sent]
