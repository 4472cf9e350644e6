"""Ranks that hold parameters and buffers which no call reads: measured and predicted bytes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import PeakMemory


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        self.spare = nn.Linear(384, 384)
        self.again = nn.Linear(384, 384, bias=False)
        self.again.weight = self.spare.weight
        self.register_buffer("table", torch.ones(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def held(preset: str) -> dict[str, Any]:
    """Bytes held between steps, and the peak of a step."""
    inputs = {"x": torch.ones(8, 512)}
    model = autopar.autoparallelize(Spare(), inputs, init_device_mesh("cpu", (2,)), constraints=preset)
    optimizer = torch.optim.AdamW(model.parameters())
    tensors = [getattr(t, "_local_tensor", t) for t in (*model.parameters(), *model.buffers())]
    found = {"held": sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())}

    def step() -> None:
        model(**inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer states
    memory = PeakMemory(torch.device("cpu"))
    with memory.measure(model, optimizer, inputs):
        step()
    states = [p for p, state in optimizer.state.items() if state]
    predicted = autopar.plan_of(model).predicted
    return found | {
        "predicted_held": predicted.parts["parameters"] + predicted.parts["unread weights"],
        "peak": memory.peak_bytes,
        "predicted_peak": predicted.peak_bytes,
        "with_state": len(states),
    }


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {preset: functools.partial(held, preset) for preset in ("ddp", "fsdp")}
}
