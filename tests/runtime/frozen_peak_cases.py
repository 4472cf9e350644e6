"""Ranks that train models with frozen parameters: measured peaks of steps, and the prediction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from peak_cases import LENGTH, MODELS, WORDS, Words, measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cost.buckets import size as bucket_size


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: nn.Module) -> None:
    """Freeze the model, and add adapters beside the products of attention, or beside plain linear layers."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.split(".")[-1] in ("q_proj", "v_proj", "0", "1", "2", "3"):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, Adapted(module, 4))


def freeze(*prefixes: str) -> Callable[[nn.Module], None]:
    def frozen(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))

    return frozen


def freeze_but_head(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("head" in name)


WAYS: dict[str, dict[str, Callable[[nn.Module], None]]] = {
    "words": {
        "embedding": freeze("words"),
        "embedding and head": freeze("words", "head"),
        "embedding and three layers": freeze("words", "layers.0", "layers.1", "layers.2"),
        "all but the head": freeze_but_head,
        "adapters": adapt,
    },
    "llama": {
        "embedding and head": freeze("model.embed_tokens", "lm_head"),
        "embedding and two layers": freeze("model.embed_tokens", "model.layers.0", "model.layers.1"),
        "all but the head": freeze_but_head,
        "adapters": adapt,
    },
}
LAYERS, PRESETS = 4, ("fsdp", "ddp", "tp")
RECOMPUTING = ("ddp(recompute=full)", "fsdp(recompute=full)")
# One bucket for each block, since recompute divides larger ones. Attention is in `recompute_peak_cases.py`.
RECOMPUTED = [*(("words", way) for way in WAYS["words"]), ("llama", "all but the head")]


def peaks(name: str, way: str, preset: str, bucket_bytes: int = bucket_size.BUCKET_BYTES) -> dict[str, Any]:
    torch.manual_seed(0)
    if name == "words":
        model: nn.Module = Words(LAYERS)
        batch = {"ids": torch.randint(4096, (16, 4))}
    else:
        build, rows = MODELS[name]
        ids = torch.randint(WORDS, (rows, LENGTH))
        model, batch = build(LAYERS), {"input_ids": ids, "labels": ids}
    WAYS[name][way](model)
    with mock.patch.object(bucket_size, "BUCKET_BYTES", bucket_bytes):
        model = autopar.autoparallelize(model, batch, init_device_mesh("cpu", (2,)), constraints=preset)
    return measured(model, batch, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


def trained(by: str) -> dict[str, Any]:
    """Losses of an adapted model in one process and under a preset; the frozen weights that are regathered, and the
    recomputed blocks."""
    build, rows = MODELS["llama"]
    losses: list[list[float]] = []
    for preset in (None, by):
        torch.manual_seed(0)
        ids = torch.randint(WORDS, (rows, LENGTH))
        batch, model = {"input_ids": ids, "labels": ids}, build(LAYERS)
        adapt(model)
        model = model.double()
        if preset is not None:
            model = autopar.autoparallelize(model, batch, init_device_mesh("cpu", (2,)), constraints=preset)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(4):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    made = autopar.plan_of(model)
    again = [one.name for one in made.parameters if one.regather and not one.trainable]
    return {"losses": losses, "again": again, "recomputed": [one.name for one in made.recompute]}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{name}, {way}, {preset}": functools.partial(peaks, name, way, preset)
        for name, ways in WAYS.items()
        for way in ways
        for preset in (PRESETS if way == "adapters" else PRESETS[:1])
    }
    | {
        f"words, {way}, fsdp, {size >> 10} KiB": functools.partial(peaks, "words", way, "fsdp", size)
        for way in WAYS["words"]
        for size in (1 << 20, 256 << 10)
    }
    | {
        f"{name}, {way}, {preset}(recompute=full), small buckets": functools.partial(
            peaks, name, way, f"{preset}(recompute=full)", 256 << 10
        )
        for name, way in RECOMPUTED
        for preset in ("fsdp", "ddp")
    }
    | {f"adapters, trained, {by}": functools.partial(trained, by) for by in ("fsdp", *RECOMPUTING)}
}
