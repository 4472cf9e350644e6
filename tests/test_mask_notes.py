"""The plan notes where attention only reads a mask because an input might require one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from autopar import Cluster, plan

IDS = torch.empty(4, 16, dtype=torch.long, device="meta")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def _notes(model: nn.Module, **inputs: torch.Tensor) -> tuple[str, ...]:
    return plan(model, inputs, Cluster.preset("h100", (2,)), loss_fn=None).notes


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, use_cache=False)),
        (transformers.BertForMaskedLM, transformers.BertConfig(**SIZES)),
    ],
)
def test_a_mask_for_padding_is_named(architecture: Any, config: Any) -> None:
    model = architecture(config)
    assert not _notes(model, input_ids=IDS, labels=IDS)
    [note] = _notes(model, input_ids=IDS, labels=IDS, attention_mask=IDS)
    assert note.startswith("attention (2 ops) reads a mask of 4x1x16x16 made of the input attention_mask")
    assert "leave attention_mask out" in note


def test_what_stays_without_the_input_is_not() -> None:
    """T5's mask is also its position bias, and the other two masks say more than which tokens count."""
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    assert not _notes(transformers.T5ForConditionalGeneration(config), input_ids=IDS, labels=IDS, attention_mask=IDS)
    x = torch.empty(4, 4, 16, 8, device="meta")
    pairs = torch.empty(16, 16, device="meta", dtype=torch.bool)
    assert not _notes(Masked(), x=x, mask=pairs)
    assert not _notes(Masked(), x=x, mask=torch.empty(4, 1, 16, 16, device="meta", dtype=torch.bool))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x * self.scale, x, x, mask).sum()
