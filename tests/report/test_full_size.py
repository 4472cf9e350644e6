"""A full-size report stays small: Llama-3-70B on 256 devices, under a budget that requires recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

import autopar
from autopar.plans import Plan
from autopar.report.page import answers, page


@pytest.mark.slow
def test_llama_70b_on_256_devices() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.empty(256, 8192, dtype=torch.long)
    cluster = autopar.Cluster.preset("h100", (32, 8), ("dp", "tp"))
    inputs = {"input_ids": ids, "labels": ids}
    plan = autopar.plan(model, inputs, cluster, memory_budget="75GiB", time_limit=300)
    assert len(page(plan).encode()) < 3 << 20
    fits, _, recomputed, _ = answers(plan)
    assert fits[1].startswith("Yes: ") and fits[1].endswith("of 75.0 GiB")
    assert recomputed[1].startswith("model.layers.{")


def test_repeated_layers_take_no_room(plan: Plan) -> None:
    """Twice as many equal blocks do not make the trees larger."""
    nodes = plan.nodes[:-1] + tuple(
        replace(n, scope=n.scope.replace(f"h.{i}", f"h.{i + 4}"))
        for i in range(4)
        for n in plan.nodes
        if n.scope.startswith(f"transformer.h.{i}")
    )
    more = replace(plan, nodes=(*nodes, plan.nodes[-1]))
    assert "h.{0-7}" in page(more)
    assert abs(len(page(more)) - len(page(plan))) < 100
