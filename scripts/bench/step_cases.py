"""Models and training text of `step_time.py` and of the ablation's measured steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data import topics

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, and the shape of each rank's part of the batch."""

    build: Callable[[], nn.Module]
    rows: int
    sequence: int
    vocabulary: int
    blocks: str  # path of the list of blocks


def gpt2(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def _sizes(layers: int, width: int, heads: int, inner: int | None = None) -> dict[str, int]:
    """Config fields with the names of most transformers models; `inner`: width of feed-forward layers (4 * `width`)."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner or 4 * width,
        "num_attention_heads": heads,
    }


def llama(layers: int, width: int, heads: int, vocabulary: int, inner: int | None = None) -> nn.Module:
    config = transformers.LlamaConfig(
        **_sizes(layers, width, heads, inner),
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def bert(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    config = transformers.BertConfig(
        **_sizes(layers, width, heads),
        vocab_size=vocabulary,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def vit(layers: int, width: int, heads: int, image: int, patch: int, labels: int) -> nn.Module:
    config = transformers.ViTConfig(
        **_sizes(layers, width, heads),
        image_size=image,
        patch_size=patch,
        num_labels=labels,
        hidden_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


CASES = {
    "gpt2-small": Case(lambda: gpt2(6, 384, 6, 4096), 4, 128, 4096, "transformer.h"),
    "gpt2": Case(lambda: gpt2(12, 768, 12, 50257), 1, 256, 50257, "transformer.h"),
    "llama-small": Case(lambda: llama(6, 384, 6, 4096), 4, 128, 4096, "model.layers"),
    "llama-350m": Case(lambda: llama(24, 1024, 16, 32000, 2816), 1, 256, 32000, "model.layers"),
}


def build(case: Case) -> nn.Module:
    """Build the model, with the same weights in every call and process."""
    torch.manual_seed(0)
    return case.build().train()


@functools.cache
def corpus() -> torch.Tensor:
    """About 700 kB of English text about Python, as bytes."""
    text = "\n\n".join(topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(case: Case, step: int, rows: int, part: int = 0) -> Batch:
    """Rows of text from random positions."""
    generator = torch.Generator().manual_seed(7919 * step + part)
    starts = torch.randint(0, len(corpus()) - case.sequence, (rows, 1), generator=generator)
    ids = corpus()[starts + torch.arange(case.sequence)]
    return {"input_ids": ids, "labels": ids}
