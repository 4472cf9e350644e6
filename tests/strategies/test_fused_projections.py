"""Under tensor parallelism the heads of a fused qkv, and a fused gate and up, stay sharded and are never gathered.

Checked in the solver's plans: between the fused projection and attention (or the last product of an MLP) no edge
converts a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import fx, nn

from autopar import Cluster
from autopar.graph import TensorRef, target_name, tensor_inputs, tensor_of
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.plans import NodePlan
from autopar.stopwatch import Stopwatch

PRODUCTS = ("linear", "mm")


class Attention(nn.Module):
    """Attention of a vision transformer, with q, k and v unbound from one permuted tensor."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, count, width = x.shape
        qkv = self.qkv(x).reshape(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, count, width))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(1024) for _ in range(2))
        self.blocks = nn.ModuleList(Attention(1024, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x.square().mean()


IDS = torch.empty(8, 1024, dtype=torch.long, device="meta")
TEXT = {"input_ids": IDS, "labels": IDS}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=1024, n_head=16, n_layer=2, vocab_size=4096, use_cache=False)
        ),
        TEXT,
    ),
    "phi3": (
        lambda: transformers.Phi3ForCausalLM(
            transformers.Phi3Config(
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=2,
                num_attention_heads=16,
                num_key_value_heads=16,
                vocab_size=4096,
                pad_token_id=0,
                use_cache=False,
            )
        ),
        TEXT,
    ),
    "vit": (VisionTransformer, {"x": torch.empty(64, 256, 1024, device="meta")}),
}


def timm_model() -> nn.Module:
    """timm's model if it is installed; otherwise `VisionTransformer` has the same attention."""
    timm = pytest.importorskip("timm")
    made: nn.Module = timm.create_model("vit_base_patch16_224", depth=2, num_heads=16, embed_dim=1024, num_classes=0)
    return nn.Sequential(made, Squared())


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


MODELS["timm"] = (timm_model, {"input": torch.empty(64, 3, 224, 224, device="meta")})


def planned(name: str) -> tuple[fx.Graph, dict[fx.Node, NodePlan]]:
    make, inputs = MODELS[name]
    with torch.device("meta"):
        model = make()
    cluster = Cluster.preset("h100", (4,))
    request = request_of(cluster, None, "bf16", 1, "adamw", "tp", None, "global", 60)
    traced = trace_for(model, inputs, None, request, Stopwatch())
    plan = prepare(model, traced, request, Stopwatch()).solve()
    nodes = list(traced.graph.nodes)
    return traced.graph, {nodes[p.position]: p for p in plan.nodes}


def edges_back(plans: dict[fx.Node, NodePlan], node: fx.Node, wanted: Any) -> Iterator[tuple[TensorRef, str, str]]:
    """All edges from `node` back to the nearest products: the tensor, its layout as made, and its layout as read."""
    refs = tensor_inputs(node)
    for index, ref in enumerate(refs):
        if index not in wanted:
            continue
        keep = (lambda layout: layout) if tensor_of(ref).requires_grad else (lambda layout: layout.value())
        yield ref, str(keep(plans[ref.node].outputs[ref.index])), str(keep(plans[node].inputs[index]))
        if target_name(ref.node).rpartition(".")[2] not in PRODUCTS and tensor_of(ref).requires_grad:
            yield from edges_back(plans, ref.node, range(len(plans[ref.node].inputs)))


def is_sharded(layout: str) -> bool:
    return layout.startswith("S")


@pytest.mark.parametrize("name", MODELS)
def test_attention_runs_on_heads_and_qkv_is_never_gathered(name: str) -> None:
    graph, plans = planned(name)
    attentions = [n for n in graph.nodes if "scaled_dot_product" in target_name(n)]
    assert len(attentions) == 2
    for attention in attentions:
        assert str(plans[attention].inputs[0]) == "S1", "heads are dim 1 of a query"
        edges = [e for e in edges_back(plans, attention, (0, 1, 2)) if tensor_of(e[0]).requires_grad]
        projections = {ref.node for ref, _, _ in edges if target_name(ref.node).rpartition(".")[2] in PRODUCTS}
        assert len(projections) == 1, "one product makes q, k and v"
        weights = [ref for ref, _, _ in edges if ref.node.op == "get_attr"]
        moved = [(ref, made, want) for ref, made, want in edges if made != want and ref not in weights]
        assert len(edges) >= 6
        assert moved == []


def test_a_fused_gate_and_up_is_never_gathered() -> None:
    graph, plans = planned("phi3")
    lasts = [n for n in graph.nodes if n.meta["scope"] and n.meta["scope"][-1][0].endswith("down_proj")]
    lasts = [n for n in lasts if target_name(n).rpartition(".")[2] in PRODUCTS]
    assert len(lasts) == 2
    for last in lasts:
        edges = list(edges_back(plans, last, (0,)))
        assert is_sharded(edges[0][2])
        assert [(ref, made, want) for ref, made, want in edges if made != want] == []
