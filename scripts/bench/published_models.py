"""The models of the published runs: Megatron's GPT and Llama 2.

Each of Megatron's fused kernels (arXiv:2104.04473, section 4.2) is one op here: mask and scale belong to the softmax
and to the product before it, biases to the ops that read them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn


class Core(nn.Module):
    """Unfused attention without the projections: scores and probabilities are materialised as tensors."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.dropout(F.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1)), v)


class Block(nn.Module):
    """One layer of Megatron-LM's GPT (arXiv:2104.04473); the columns of the projection are ordered by heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.core, self.drop1, self.drop2 = Core(dropout), nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, self.heads, 3 * d // self.heads).transpose(1, 2).chunk(3, dim=-1)
        x = x + self.drop1(self.out(self.core(q, k, v).transpose(1, 2).reshape(b, s, d)))
        return x + self.drop2(self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh")))


class GPT(nn.Module):
    """A GPT with a tied head, which returns the loss. `input_ids`: (batch, sequence)."""

    def __init__(
        self, layers: int, width: int, heads: int, vocabulary: int = 51200, sequence: int = 2048, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(input_ids) + self.places.weight)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


LLAMA: dict[str, dict[str, Any]] = {
    "7B": {},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "34B": {  # Code Llama's sizes: Llama 2 34B was never released
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def llama(size: str, layers: int | None = None) -> nn.Module:
    """Llama 2 with fused attention."""
    values = {**LLAMA[size], **({"num_hidden_layers": layers} if layers else {})}
    config = transformers.LlamaConfig(**values, use_cache=False, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config)
