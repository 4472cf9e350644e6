"""Small language models of transformers and a training loop, shared by cases on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]


def gpt2(dropout: float = 0.0, vocabulary: int = 64) -> nn.Module:
    """The head is tied to the embedding."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=vocabulary, n_positions=32, use_cache=False
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def llama(vocabulary: int = 64) -> nn.Module:
    """The head is not tied to the embedding."""
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=vocabulary)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim, config.use_cache = 8, False
    return transformers.LlamaForCausalLM(config)


def mixtral(vocabulary: int = 64, layers: int = 2) -> nn.Module:
    """A mixture of four experts, with one expert for each token."""
    config = transformers.MixtralConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, vocab_size=vocabulary, use_cache=False
    )
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.num_local_experts, config.num_experts_per_tok = 4, 1
    return transformers.MixtralForCausalLM(config)


def losses_of(run: Callable[..., Any], optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> list[float]:
    """Train on batches with clipped gradients; `run`: the model, compiled or not. Returns the losses."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    losses = []
    for batch in batches:
        loss = run(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
