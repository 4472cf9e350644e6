"""Ranks that train causal attention split over query positions: measured peaks of steps, and the prediction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar

HEADS, SIZE = 3, 16  # two devices cannot split three heads, only positions


class Attention(nn.Module):
    """Pre-norm attention with `groups` key and value heads."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.norm = nn.LayerNorm(HEADS * SIZE)
        self.query = nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.pair = nn.Linear(HEADS * SIZE, 2 * groups * SIZE)
        self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        y = self.norm(x)
        query = self.query(y).view(rows, length, HEADS, SIZE).transpose(1, 2)
        pair = self.pair(y).view(rows, length, 2 * self.groups, SIZE).transpose(1, 2)
        key, value = pair.chunk(2, 1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.groups < HEADS)
        return x + self.out(y.transpose(1, 2).reshape(rows, length, HEADS * SIZE))


class Text(nn.Module):
    """A single sequence, so that the batch cannot be split either."""

    def __init__(self, layers: int, groups: int = HEADS) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Attention(groups) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def peaks(layers: int, groups: int, length: int, shape: tuple[int, ...] = (2,), **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(1, length, HEADS * SIZE)}
    model: nn.Module = Text(layers, groups)
    mesh = init_device_mesh("cpu", shape)
    model = autopar.autoparallelize(model, batch, mesh, optimizer="sgd", time_limit=20, **options)
    found = measured(model, batch, torch.optim.SGD(model.parameters()))
    nodes = autopar.plan_of(model).nodes
    found["local"] = [(node.local, str(node.inputs[0])) for node in nodes if "sdpa" in node.local]
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{layers} layers, {groups} groups, {length}": functools.partial(peaks, layers, groups, length)
        for layers, groups, length in ((1, HEADS, 2048), (4, HEADS, 1024), (4, 1, 1024), (1, HEADS, 1022))
    },
    4: {
        "two axes": functools.partial(peaks, 2, HEADS, 1024, (2, 2)),
        "one axis": functools.partial(peaks, 2, HEADS, 1024, (4,)),
    },
}
