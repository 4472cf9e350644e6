"""Ranks that hold gradients of several micro-batches, or until they are cast: measured peaks and the prediction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peak_memory import PeakMemory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

STEPS, PRESETS, MICRO_BATCHES = 3, ("ddp", "fsdp", "tp"), (1, 2, 3)


class Deep(nn.Module):
    """Weights that are much larger than the activations, all in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Loop(nn.Module):
    """One block applied several times: over all applications and micro-batches it has one gradient for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + self.down(torch.tanh(self.up(x)))
        return x.square().mean()


def peaks(
    preset: str,
    micro_batches: int,
    precision: str = "fp32",
    given: torch.dtype | None = None,
    build: Callable[[], nn.Module] = Deep,
) -> dict[str, Any]:
    """Measured and predicted peak bytes of steps; `given`: the batch's dtype, if ops read it in another one."""
    torch.manual_seed(0)
    dtype = given or autopar.Precision.of(precision).compute
    batch, mesh = {"x": torch.randn(64, 256, dtype=dtype)}, init_device_mesh("cpu", (2,))
    options: Any = {"constraints": preset, "micro_batches": micro_batches, "optimizer": "sgd", "precision": precision}
    model = autopar.autoparallelize(build(), batch, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        memory = PeakMemory(torch.device("cpu"))
        with memory.measure(model, optimizer, batch, when=step > 0):
            for _ in range(micro_batches):
                model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(memory.peak_bytes)
    return {"measured": found[1:], "predicted": autopar.plan_of(model).predicted.peak_bytes}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{preset}, {many}": functools.partial(peaks, preset, many) for preset in PRESETS for many in MICRO_BATCHES}
    | {f"{preset}, bf16": functools.partial(peaks, preset, 1, "bf16") for preset in PRESETS}
    | {f"{preset}, cast": functools.partial(peaks, preset, 1, "bf16", torch.float32) for preset in PRESETS}
    | {
        f"a block in a loop, {preset}": functools.partial(peaks, preset, 2, build=Loop)
        for preset in ("ddp", "ddp(recompute=full)")
    }
}
