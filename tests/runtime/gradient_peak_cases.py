"""Ranks whose peak is where gradients have another layout than the tensors that they belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InfeasibleError

WORDS, LENGTH, LAYERS = 64, 64, 2


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=LAYERS, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=172, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def phi() -> nn.Module:
    """Attention and the parallel feed-forward layers read the same tensor."""
    config = transformers.PhiConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.PhiForCausalLM(config)


def peaks(
    build: Callable[[], nn.Module],
    asked: str | None,
    *,
    least: bool,
    rows: int = 32,
    precision: torch.dtype | str = torch.float32,
) -> dict[str, Any]:
    """Peaks of a step without a budget or, with `least`, under the smallest budget that has a plan."""
    ids = torch.randint(WORDS, (rows, LENGTH))
    batch, mesh = {"input_ids": ids, "labels": ids}, init_device_mesh("cpu", (2,))
    plan = functools.partial(
        autopar.autoparallelize, build(), batch, mesh, constraints=asked, optimizer="sgd", precision=precision,
        time_limit=20,
    )  # fmt: skip
    model = plan(memory_budget=_least(plan)) if least else plan()
    return measured(model, batch, torch.optim.SGD(model.parameters()))


def _least(plan: Callable[..., nn.Module]) -> int:
    with pytest.raises(InfeasibleError) as refused:
        plan(memory_budget=1000)
    assert refused.value.smallest_budget_bytes is not None
    return refused.value.smallest_budget_bytes


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "bert": functools.partial(peaks, bert, None, least=True),
        "bert, tp": functools.partial(peaks, bert, "tp", least=True),
        "gpt2, tp": functools.partial(peaks, gpt2, "tp", least=True),
        "llama, tp": functools.partial(peaks, llama, "tp", least=True),
        "phi, split sequence": functools.partial(peaks, phi, "tp(sequence=split)", least=False),
        # few rows: beside such small activations the tensors that replays gather are large
        "phi, replays gather": functools.partial(peaks, phi, "tp", least=True, rows=4, precision="bf16"),
    }
}
