"""Ranks that train small language models: the peaks of steps, beside what the plan predicted."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import PeakMemory

STEPS = 4
WORDS, LENGTH = 256, 32


def gpt2(layers: int) -> nn.Module:
    """Tied, and wide beside its batch: parameters and their gradients make the peak."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> nn.Module:
    """Untied, and narrow: activations make the peak, with the weights that are gathered again beside them."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[int], nn.Module], int]] = {"gpt2": (gpt2, 2), "llama": (llama, 8)}
LAYERS, PRESETS = (1, 2, 4), ("ddp", "fsdp", "tp")


def peaks(name: str, layers: int, preset: str) -> dict[str, Any]:
    build, rows = MODELS[name]
    ids = torch.randint(WORDS, (rows, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    model = autopar.autoparallelize(build(layers), batch, init_device_mesh("cpu", (2,)), constraints=preset)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        output = model(**batch)  # held meanwhile, as in most training loops
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer makes its state
    found = []
    for _ in range(STEPS):
        memory = PeakMemory(torch.device("cpu"))
        with memory.measure(model, optimizer, batch):
            step()
        found.append(memory.peak_bytes)
    return {"measured": found, "predicted": autopar.plan_of(model).predicted.peak_bytes}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{name}, {layers}, {preset}": functools.partial(peaks, name, layers, preset)
        for name in MODELS
        for layers in LAYERS
        for preset in PRESETS
    }
}
