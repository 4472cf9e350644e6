"""Peaks of plans that gather gradients of weights, as of a fused projection that is split by heads: as predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar import autoparallelize, plan_of
from autopar.runtime.live_storages import LiveStorages

HEADS, WIDTH, LENGTH = 4, 64, 8


class Block(nn.Module):
    """Its norm is whole on every rank; what one product gives for queries, keys and values is split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.fused(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        return x + self.out(mixed)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as the first of so many."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def test_peak_is_the_predicted_one(ranks: int) -> None:
    """Of two ranks it is where a bucket of all blocks is handed in, of four where gradients are made of what came."""
    batch, mesh = {"input": torch.rand(1, LENGTH, WIDTH)}, init_device_mesh("cpu", (ranks,))
    options: dict[str, Any] = {"constraints": "tp", "optimizer": "sgd", "loss_fn": lambda y: y.square().mean()}
    model = autoparallelize(nn.Sequential(*(Block() for _ in range(3))), batch, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters())
    with LiveStorages([*model.parameters(), *batch.values()]) as live:
        model(**batch).backward()
        optimizer.step()
    predicted = plan_of(model).predicted.peak_bytes
    assert live.peak_bytes <= predicted * 1.001
    assert predicted <= live.peak_bytes * 1.01
