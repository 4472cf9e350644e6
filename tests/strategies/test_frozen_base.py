"""Low-rank adapters on a frozen base: backward communicates only for trained parameters and what leads to them."""

from __future__ import annotations

import math

import peft
import pytest
import torch
import transformers
from torch import nn

from autopar import Cluster
from autopar.graph import tensor_inputs, tensor_of
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.plans import Plan
from autopar.stopwatch import Stopwatch

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # caused by peft


def adapted(rank: int = 8) -> nn.Module:
    """A small Llama with peft's adapters on a row-parallel product and on two column-parallel ones."""
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=1024, use_cache=False,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=rank, target_modules=["q_proj", "o_proj", "down_proj"])
    with torch.device("meta"):
        model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    return model


def planned(preset: str) -> tuple[nn.Module, Plan]:
    model, ids = adapted(), torch.empty(16, 256, dtype=torch.long, device="meta")
    cluster = Cluster.preset("h100", (4,))
    request = request_of(cluster, None, "fp32", 1, "adamw", preset, None, "global", 60)
    traced = trace_for(model, {"input_ids": ids, "labels": ids}, None, request, Stopwatch())
    prepared = prepare(model, traced, request, Stopwatch())
    for node, ways in prepared.strategies.items():
        tensors = [tensor_of(ref) for ref in tensor_inputs(node)]
        for way in ways:
            for tensor, layout in zip(tensors, way.inputs, strict=True):
                assert tensor.requires_grad or layout == layout.value(), "no gradient, no partial gradient"
    return model, prepared.solve()


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_only_the_adapters_gradients_are_reduced(preset: str) -> None:
    model, plan = planned(preset)
    trained = {name: 4 * p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 12
    backward = [c for c in plan.collectives if c.phase == "backward"]
    reduced = [c for c in backward if c.kind in ("all_reduce", "reduce_scatter")]
    assert sum(c.bytes * c.count for c in reduced) == sum(trained.values())
    assert not [c for c in backward if c.kind == "all_to_all"]
    if preset == "ddp":
        assert backward == reduced


def test_tensor_parallel_sums_no_more_than_activations() -> None:
    """Backward has at most an all-reduce of the input gradient of each trained branch; none for frozen ones."""
    model, plan = planned("tp")
    moved = sum(c.bytes * c.count for c in plan.collectives if c.phase == "backward")
    activation = 4 * math.prod((16, 256, 512))
    # each layer has three column-parallel inputs (q with k and v; gate with up; the adapters), and there is the head's
    assert moved <= activation * (3 * 2 + 1)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    causes = {c.cause for c in plan.collectives if c.phase == "backward"}
    assert not causes & {f"parameter {name}" for name in frozen}
