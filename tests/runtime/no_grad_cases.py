"""Ranks that call planned models without gradients, after a step: the results, against one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Dropping(nn.Module):
    """Blocks that end in a dropout, which is not in the graph after `eval()`."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = x + block(x)
        return x.square().mean()


class Plain(nn.Module):
    """Two layers whose weights and biases are reduced in different ways on two axes, and gathered in one way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def apart(build: Callable[[], nn.Module], mesh: tuple[int, ...], constraints: Any) -> float:
    """The largest difference of losses without gradients, for the traced batch size and another one."""
    torch.manual_seed(0)
    alone = build().double()
    batches = [torch.randn(rows, 16, dtype=torch.float64) for rows in (8, 4)]
    model = autopar.autoparallelize(
        copy.deepcopy(alone), {"x": batches[0]}, init_device_mesh("cpu", mesh), constraints=constraints
    )
    model(batches[0]).backward()
    model.eval()
    alone.eval()
    with torch.no_grad():
        return max(abs(float(model(batch)) - float(alone(batch))) for batch in batches)


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {"a constraint on a dropout": functools.partial(apart, Dropping, (2,), "recompute:h.*.3 = full")},
    4: {name: functools.partial(apart, Plain, (2, 2), name) for name in ("fsdp+tp", "fsdp+tp(zero=2)", "hsdp")},
}
