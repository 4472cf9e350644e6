"""Ranks whose plans recompute blocks of attention, with and without caches that the caller holds: peaks of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from frozen_peak_cases import adapt
from peak_cases import LENGTH, MODELS, WORDS, measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.buckets import size as bucket_size

LAYERS, BUCKET_BYTES = 4, 256 << 10  # bucket bytes: at most a block, since recompute divides larger buckets
SHARED_BYTES = 64 << 20  # bucket bytes: one bucket for all blocks


def peaks(
    name: str,
    preset: str,
    rows: int,
    *,
    caches: bool = True,
    adapters: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Any]:
    """Peaks if every block is recomputed; `adapters`: the model is frozen, with adapters beside its products."""
    torch.manual_seed(0)
    build, _ = MODELS[name]
    model = build(LAYERS)
    model.config.use_cache = caches  # type: ignore[union-attr]
    if adapters:
        adapt(model)
    ids = torch.randint(WORDS, (rows, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    with mock.patch.object(bucket_size, "BUCKET_BYTES", bucket_bytes):
        mesh = init_device_mesh("cpu", (2,))
        model = autopar.autoparallelize(model, batch, mesh, constraints=f"{preset}(recompute=full)")
    assert len(autopar.plan_of(model).recompute) == LAYERS
    return measured(model, batch, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


def peaks_within_budget(name: str, rows: int, *, adapters: bool = False) -> dict[str, Any]:
    """Peaks of a plan that recomputes parts of blocks to fit a budget."""
    torch.manual_seed(0)

    def build(layers: int) -> nn.Module:
        model: nn.Module = MODELS[name][0](layers)
        if adapters:
            adapt(model)
        return model

    ids = torch.randint(WORDS, (rows, LENGTH))
    batch, mesh = {"input_ids": ids, "labels": ids}, init_device_mesh("cpu", (2,))
    cluster = autopar.Cluster.preset("cpu", (2,))
    with mock.patch.object(bucket_size, "BUCKET_BYTES", BUCKET_BYTES):
        free = autopar.plan(build(LAYERS), batch, cluster, constraints="ddp").predicted.peak_bytes
        model = autopar.autoparallelize(build(LAYERS), batch, mesh, constraints="ddp", memory_budget=free * 8 // 10)
    assert any(segment.inner for segment in autopar.plan_of(model).recompute)
    return measured(model, batch, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "llama, ddp": functools.partial(peaks, "llama", "ddp", 16),
        "llama, ddp, few rows": functools.partial(peaks, "llama", "ddp", 8),
        "llama, ddp, no caches": functools.partial(peaks, "llama", "ddp", 16, caches=False),
        "llama, tp": functools.partial(peaks, "llama", "tp", 16),
        "llama, fsdp": functools.partial(peaks, "llama", "fsdp", 32),
        "llama, fsdp, shared buckets": functools.partial(peaks, "llama", "fsdp", 32, bucket_bytes=SHARED_BYTES),
        "llama, ddp, adapters": functools.partial(peaks, "llama", "ddp", 8, adapters=True),
        "llama, fsdp, adapters": functools.partial(peaks, "llama", "fsdp", 8, adapters=True),
        "gpt2, ddp": functools.partial(peaks, "gpt2", "ddp", 16),
        "gpt2, tp": functools.partial(peaks, "gpt2", "tp", 16),
        "gpt2, tp, shared buckets": functools.partial(peaks, "gpt2", "tp", 16, caches=False, bucket_bytes=SHARED_BYTES),
        "llama, parts of blocks": functools.partial(peaks_within_budget, "llama", 32),
        "llama, parts of blocks, adapters": functools.partial(peaks_within_budget, "llama", 32, adapters=True),
        "gpt2, parts of blocks": functools.partial(peaks_within_budget, "gpt2", 32),
    }
}
