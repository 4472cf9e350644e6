"""Parameters that ranks cannot share evenly, on real ranks: worker of `test_ragged_on_ranks`.

If each rank decided by the sizes of its own shards, ranks would begin the collectives of different buckets.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from loop_cases import trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

MANY = 12
SCHEMES = ("fsdp", "fsdp(recompute=full)", "tp", "fsdp+tp")


class Odd(nn.Module):
    """Equal blocks between layers of odd sizes."""

    def __init__(self, given: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(given, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def differs(scheme: str) -> float:
    """The largest difference of losses or parameters of several models of odd sizes from one process."""
    draw, most = random.Random(len(scheme)), 0.0
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2) if "+" in scheme else (dist.get_world_size(),))
    for _ in range(MANY):
        sizes = draw.choice((3, 4, 7)), draw.choice((3, 5, 7, 9)), draw.choice((2, 3)), draw.choice(range(3, 60, 2))
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(8, sizes[0], dtype=torch.float64, generator=generator)
        batch = {"x": x, "y": torch.randint(0, sizes[-1], (8,), generator=generator)}

        def planned(model: nn.Module, batch: dict[str, torch.Tensor] = batch) -> nn.Module:
            return autopar.autoparallelize(model, batch, mesh, constraints=scheme)

        def loss(model: nn.Module, batch: dict[str, torch.Tensor] = batch) -> torch.Tensor:
            return model(**batch)

        build: Any = partial(Odd, *sizes)
        pairs = zip(trained(planned, loss, build), trained(lambda model: model, loss, build), strict=True)
        most = max(most, *((a - b).abs().max().item() for a, b in pairs))
    return most


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {scheme: partial(differs, scheme) for scheme in SCHEMES if "+" not in scheme},
    4: {scheme: partial(differs, scheme) for scheme in SCHEMES},
}
