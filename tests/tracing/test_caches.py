"""Key-value caches of transformers in a trace: the trace may fill copies only, and the state it reads is in the key."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InputError, UntraceableError
from autopar.planning.stages import request_of, trace_for
from autopar.stopwatch import Stopwatch
from autopar.tracing import trace
from autopar.tracing.huggingface import register_caches

IDS = torch.zeros(2, 6, dtype=torch.long)


@pytest.fixture
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_hidden_layers=2)).eval()


def test_an_empty_cache_is_an_input_and_stays_empty(model: LlamaForCausalLM) -> None:
    register_caches()
    cache = DynamicCache(config=model.config)
    traced = trace(model, {"input_ids": IDS, "past_key_values": cache})
    assert cache.get_seq_length() == 0
    assert all(layer.keys is None for layer in cache.layers)
    again = DynamicCache(config=model.config)
    assert traced.key((), {"input_ids": IDS, "past_key_values": again}) == traced.own_key
    traced.bind((), {"input_ids": IDS, "past_key_values": again})
    made = pytree.tree_leaves(model(IDS, past_key_values=again).past_key_values)
    assert traced.key((), {"input_ids": IDS, "past_key_values": again}) != traced.own_key, "it is filled now"
    assert [tuple(t.shape) for t in made] == [(2, 1, 6, 8)] * 4


def test_what_a_sliding_window_has_seen_tells_calls_apart() -> None:
    register_caches()
    tokens = torch.zeros(1, 1, 4, 8)
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.update(tokens, tokens)
    before = pytree.tree_flatten(layer)
    layer.update(tokens, tokens)
    after = pytree.tree_flatten(layer)
    assert [t.shape for t in before[0]] == [t.shape for t in after[0]], "the shapes alone do not tell"
    assert before[1] != after[1]
    assert str(before[1]) != str(after[1])


def test_what_a_sliding_window_has_seen_is_a_plain_number_for_the_next_call() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(**sizes, vocab_size=32, num_hidden_layers=1, sliding_window=4)
    model = MistralForCausalLM(config).eval()
    first = trace(model, {"input_ids": IDS, "past_key_values": DynamicCache(config=config)})
    call = {"input_ids": IDS, "past_key_values": DynamicCache(config=config)}
    cache = first.gm(*first.bind((), call)).past_key_values
    assert type(cache.layers[0].cumulative_length) is int
    assert cache.get_seq_length() == 6
    call = {"input_ids": IDS[:, :1], "past_key_values": cache}
    traced = trace(model, call)
    found = traced.gm(*traced.bind((), call))
    assert torch.equal(found.logits, model(IDS[:, :1], past_key_values=cache).logits)
    assert found.past_key_values.get_seq_length() == 7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_call_is_traced_in_its_own_grad_mode(model: LlamaForCausalLM, mode: type[torch.no_grad]) -> None:
    """A plan for evaluation must not save for backward, which leaving inference mode while tracing would enable."""
    request = request_of(Cluster.preset("cpu", shape=(2,)))
    with mode():
        traced = trace_for(model, {"input_ids": IDS}, None, request, Stopwatch())
        assert traced.key((), {"input_ids": IDS}) == traced.own_key
    (logits, *_), *_ = next(iter(n.args for n in traced.graph.nodes if n.op == "output"))
    assert traced.val(logits).requires_grad is (mode is torch.enable_grad)


@pytest.mark.parametrize(
    ("name", "error"), [("Bamba", UntraceableError), ("Qwen3Next", InputError)]
)  # Bamba asks a cache for what it lacks, Qwen3Next returns one that contains states
def test_caches_of_linear_attention_say_how_to_train_without(name: str, error: type[AutoparError]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32}
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    }
    experts = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = getattr(transformers, f"{name}Config")(**sizes, **(heads if name == "Bamba" else experts))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    cluster = Cluster.preset("cpu", (2,))
    with pytest.raises(error, match=r"training has no use for caches, set model\.config\.use_cache = False"):
        autopar.plan(model, {"input_ids": IDS, "labels": IDS}, cluster)
    model.config.use_cache = False
    assert autopar.plan(model, {"input_ids": IDS, "labels": IDS}, cluster, time_limit=5).nodes
