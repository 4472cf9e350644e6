"""Small models of four to eight blocks, with configs of the `transformers` library, and their planning problems."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from toys import Toy

from autopar import Cluster
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.structure.blocks import find_repeats
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.solver.constraints.restricted import Restricted
from autopar.stopwatch import Stopwatch

TOKENS = 512
NO_LIMIT = 1e6  # CPU seconds: effectively unlimited, so that no result depends on the speed of the machine


def _gpt2(layers: int, width: int, **other: Any) -> Any:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, use_cache=False, **other)
    return transformers.GPT2LMHeadModel(config)


def _decoder(kind: str, layers: int, width: int, groups: int = 4, **other: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=4,
        num_key_value_heads=groups,
        head_dim=width // 4,
        vocab_size=1024,
        pad_token_id=0,
        use_cache=False,
        **other,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _encoder(kind: str, head: str, layers: int, width: int, **other: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, num_attention_heads=4, **other
    )
    return getattr(transformers, f"{kind}For{head}")(config)


def _t5(layers: int, width: int) -> Any:
    sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_heads": 4, "vocab_size": 1024}
    config = transformers.T5Config(**sizes, num_layers=layers, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


WORDS = {"vocab_size": 1024}
PIXELS = {"image_size": 64, "patch_size": 8}
MODELS: dict[str, Any] = {
    "gpt2-4": lambda: _gpt2(4, 128),
    "gpt2-6": lambda: _gpt2(6, 64),
    "gpt2-8-wide": lambda: _gpt2(8, 256, n_inner=512),
    "llama-4": lambda: _decoder("Llama", 4, 128),
    "llama-6-grouped": lambda: _decoder("Llama", 6, 128, 2),
    "llama-8": lambda: _decoder("Llama", 8, 64),
    "llama-4-wide": lambda: _decoder("Llama", 4, 256),
    "qwen2-5": lambda: _decoder("Qwen2", 5, 128, 2),
    "qwen3-6": lambda: _decoder("Qwen3", 6, 128, 2),
    "mistral-4": lambda: _decoder("Mistral", 4, 128, 2),
    "gemma-4": lambda: _decoder("Gemma", 4, 128, 1),
    "gemma2-6": lambda: _decoder("Gemma2", 6, 128, 2),  # local attention in every other layer: blocks of two
    "phi-4": lambda: _decoder("Phi3", 4, 128),
    "olmo-5": lambda: _decoder("Olmo", 5, 128),
    "bert-4": lambda: _encoder("Bert", "MaskedLM", 4, 128, **WORDS),
    "bert-8": lambda: _encoder("Bert", "MaskedLM", 8, 64, **WORDS),
    "roberta-6": lambda: _encoder("Roberta", "MaskedLM", 6, 128, **WORDS),
    "neox-6": lambda: _encoder("GPTNeoX", "CausalLM", 6, 128, use_cache=False, **WORDS),
    "electra-5": lambda: _encoder("Electra", "MaskedLM", 5, 128, embedding_size=128, **WORDS),
    "albert-6": lambda: _encoder("Albert", "MaskedLM", 6, 128, embedding_size=64, **WORDS),  # layers share parameters
    "vit-4": lambda: _encoder("ViT", "ImageClassification", 4, 128, **PIXELS),
    "deit-6": lambda: _encoder("DeiT", "ImageClassification", 6, 128, **PIXELS),
    "t5-4": lambda: _t5(4, 128),
}


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {
            "pixel_values": torch.empty(16, 3, 64, 64, device="meta"),
            "labels": torch.empty(16, dtype=torch.long, device="meta"),
        }
    ids = torch.empty(8, TOKENS // 8, dtype=torch.long, device="meta")
    named = {"input_ids": ids, "labels": ids}
    return named | {"decoder_input_ids": ids} if model.config.is_encoder_decoder else named


def ready(name: str, *mesh: int, micro_batches: int = 1) -> Prepared:
    """A model by name, traced and priced on a mesh."""
    with torch.device("meta"):
        model: nn.Module = MODELS[name]()
    cluster = Cluster.preset("a100", mesh)
    request = request_of(cluster, precision="fp32", time_limit=NO_LIMIT, micro_batches=micro_batches)
    watch = Stopwatch()
    return prepare(model, trace_for(model, inputs_of(model), None, request, watch), request, watch)


def toy_of(asked: Prepared) -> Toy:
    """The same planning problem as a `Toy`, whose parts tests can inspect."""
    request, graph = asked.request, asked.traced.graph
    memory = memory_on(
        request.cluster,
        graph,
        dict(asked.model.named_parameters(remove_duplicate=False)),
        request.precision,
        request.optimizer,
        request.micro_batches,
    )
    return Toy(memory, Restricted(dict(asked.strategies)), request.cluster, find_repeats(graph))
