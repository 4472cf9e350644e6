"""Ranks that call models without gradients: measured peaks of calls, and the prediction."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.buckets import size as bucket_size

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from peak_cases import LENGTH, MODELS, WORDS
from peak_memory import LiveStorages

CALLS, WIDTH, ROWS = 3, 512, 8


class Wide(nn.Module):
    """Weights are much larger than activations, so that gathered weights make the peak."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Again(nn.Module):
    """Blocks that all read one weight; each block's input is returned too."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        seen = []
        for norm in self.norms:
            x = torch.relu(nn.functional.linear(norm(x), self.weight))
            seen.append(x)
        return seen


def built(name: str, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if name in MODELS:
        build, rows = MODELS[name]
        return build(layers).eval(), {"input_ids": torch.randint(WORDS, (rows, LENGTH))}
    return {"wide": Wide, "again": Again}[name](layers), {"x": torch.ones(ROWS, WIDTH)}


@torch.no_grad()
def peaks(name: str, layers: int, preset: str, bucket_bytes: int = bucket_size.BUCKET_BYTES) -> dict[str, Any]:
    model, batch = built(name, layers)
    with mock.patch.object(bucket_size, "BUCKET_BYTES", bucket_bytes):
        model = autopar.autoparallelize(model, batch, init_device_mesh("cpu", (2,)), constraints=preset)
    model(**batch)
    found = []
    for _ in range(CALLS):
        with LiveStorages([*model.parameters(), *model.buffers(), *batch.values()]) as live:
            model(**batch)
        found.append(live.peak_bytes)
    return {"measured": found, "predicted": autopar.plan_of(model).predicted.peak_bytes}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{name}, {layers}, {preset}": functools.partial(peaks, name, layers, preset)
        for name in ("wide", "again", *MODELS)
        for layers in (1, 4, 8)
        for preset in ("ddp", "fsdp", "tp")
    }
    | {
        f"wide, 8, fsdp, {size >> 10} KiB": functools.partial(peaks, "wide", 8, "fsdp", size)
        for size in (6 << 20, 1 << 20, 256 << 10)  # a bucket of a few blocks, of one block, of less than a weight
    }
}
