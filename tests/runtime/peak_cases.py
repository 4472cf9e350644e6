"""Ranks that train small language models: measured peaks of steps, and the prediction."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.buckets import size as bucket_size

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import PeakMemory

STEPS = 4
WORDS, LENGTH = 256, 32


def gpt2(layers: int) -> nn.Module:
    """Tied and wide with a small batch: parameters and their gradients make the peak."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> nn.Module:
    """Untied and narrow: activations make the peak, together with regathered weights."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[int], nn.Module], int]] = {"gpt2": (gpt2, 2), "llama": (llama, 8)}
LAYERS, PRESETS, MUON = (1, 2, 4), ("ddp", "fsdp", "tp"), ("ddp", "tp")


class Words(nn.Module):
    """An embedding and a head that are much larger than the layers between."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))
        self.head = nn.Linear(256, 4096, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).square().mean()


def peaks(name: str, layers: int, preset: str) -> dict[str, Any]:
    build, rows = MODELS[name]
    ids = torch.randint(WORDS, (rows, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    model = autopar.autoparallelize(build(layers), batch, init_device_mesh("cpu", (2,)), constraints=preset)
    return measured(model, batch, torch.optim.AdamW(model.parameters()))


def peaks_of_words(bucket_bytes: int, shape: tuple[int, ...] = (2,), preset: str = "fsdp") -> dict[str, Any]:
    """Buckets that are as small relative to the weights as 64 MiB are to the embeddings of large models."""
    batch = {"ids": torch.randint(4096, (16, 4))}
    with mock.patch.object(bucket_size, "BUCKET_BYTES", bucket_bytes):
        mesh = init_device_mesh("cpu", shape)
        model = autopar.autoparallelize(Words(4), batch, mesh, constraints=preset, optimizer="sgd")
    return measured(model, batch, torch.optim.SGD(model.parameters()))


def peaks_of_muon(preset: str) -> dict[str, Any]:
    """Muon's products of square matrices, which are as large as these, make the peak."""
    batch = {"input": torch.randn(4, 128)}
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)), nn.Flatten(0))
    mesh = init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(layers, batch, mesh, constraints=[preset, "output:* = R"], optimizer="muon")
    return measured(model, batch, torch.optim.Muon(model.parameters()), torch.sum)


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def measured(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], torch.Tensor] = loss_of,
) -> dict[str, Any]:
    def step() -> None:
        output = model(**batch)  # held until the next step, as in most training loops
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer states
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
    | {f"words, {size >> 10} KiB": functools.partial(peaks_of_words, size) for size in (64 << 20, 1 << 20, 256 << 10)}
    | {f"muon, {preset}": functools.partial(peaks_of_muon, preset) for preset in MUON},
    4: {  # one rank's shard of a weight larger than a bucket
        f"words, {size >> 10} KiB, {preset}": functools.partial(peaks_of_words, size, (2, 2), preset)
        for size in (64 << 20, 256 << 10)
        for preset in ("fsdp+tp", "hsdp")
    },
}
