"""Ranks whose float inputs have another dtype than the compute dtype: peaks, and gradients of inputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import LiveStorages

WIDTH, ROWS = 256, 2048
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Reader(nn.Module):
    """The batch is larger than anything else, and every block reads it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(blocks))
        self.between = nn.ModuleList(nn.Linear(32, 32) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros((), dtype=x.dtype, device=x.device)
        for block, between in zip(self.blocks, self.between, strict=True):
            h = between(torch.relu(block(x) + h))
        return h.square().mean()


def planned(dtype: torch.dtype, blocks: int, constraint: str, inputs: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    x, mesh = torch.randn(ROWS, WIDTH, dtype=dtype), init_device_mesh("cpu", (2,))
    options: Any = {"precision": "bf16", "optimizer": "sgd", "constraints": constraint, "inputs": inputs}
    model = autopar.autoparallelize(Reader(blocks), {"x": x}, mesh, **options)
    return model, {"x": autopar.local_batch(model, x).clone()}


def peaks(dtype: torch.dtype, blocks: int, constraint: str, inputs: str = "global") -> dict[str, Any]:
    model, batch = planned(dtype, blocks, constraint, inputs)
    return measured(model, batch, torch.optim.SGD(model.parameters()))


@torch.no_grad()
def peaks_of_calls(dtype: torch.dtype, blocks: int) -> dict[str, Any]:
    model, batch = planned(dtype, blocks, "fsdp", "global")
    model(**batch)
    found = []
    for _ in range(3):
        with LiveStorages([*model.parameters(), *batch.values()]) as live:
            model(**batch)
        found.append(live.peak_bytes)
    return {"measured": found, "predicted": autopar.plan_of(model).predicted.peak_bytes}


def gradient() -> dict[str, Any]:
    """The gradient of an input, whole on every rank, and that of one process."""
    torch.manual_seed(0)
    alone, mesh = Reader(2), init_device_mesh("cpu", (2,))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    model = Reader(2)
    model.load_state_dict(alone.state_dict())
    autopar.autoparallelize(model, {"x": other}, mesh, precision="bf16", constraints="ddp")(x=other).backward()
    alone.to(torch.bfloat16)(x.to(torch.bfloat16)).backward()
    assert x.grad is not None
    assert other.grad is not None
    return {
        "dtype": str(other.grad.dtype),
        "error": ((other.grad - x.grad).norm() / x.grad.norm()).item(),
    }


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{name}, {blocks}, {constraint}": functools.partial(peaks, dtype, blocks, constraint)
        for name, dtype in DTYPES.items()
        for blocks in (1, 4)
        for constraint in ("ddp", "fsdp", "ddp(recompute=full)")
        if blocks > 1 or "full" not in constraint
    }
    | {
        f"{name}, own rows": functools.partial(peaks, DTYPES[name], 4, "ddp", "local")
        for name in ("float32", "float64")
    }
    | {f"{name}, no_grad": functools.partial(peaks_of_calls, dtype, 1) for name, dtype in DTYPES.items()}
    | {"gradient": gradient}
}
