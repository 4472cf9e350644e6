"""Peaks of steps of one rank, where the others are torch's fake process group: as predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


@pytest.fixture(params=["2", "4", "2, 4"])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """This process is the first of so many."""
    shape = tuple(map(int, request.param.split(", ")))
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    yield init_device_mesh("cpu", shape)
    dist.destroy_process_group()


def live_and_predicted(model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh, **options: Any) -> list[int]:
    """Peak bytes of a step."""
    options |= {"optimizer": "sgd", "loss_fn": torch.mean}
    model = autoparallelize(model, batch, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters())
    with LiveStorages([*model.parameters(), *model.buffers(), *batch.values()]) as live:
        model(**batch).backward()
        optimizer.step()
    return [live.peak_bytes, plan_of(model).predicted.peak_bytes]


def test_gradients_of_a_fused_projection_that_is_split_by_heads_are_gathered(mesh: DeviceMesh) -> None:
    """The peak is, of two ranks, where a bucket of all blocks is handed in; of four, where gradients are made of what
    came; of two axes, where a weight arrives of which most is cut off."""
    rows, constraints = (1, "tp") if mesh.ndim == 1 else (32, "fsdp+tp")
    blocks, batch = nn.Sequential(*(Block() for _ in range(3))), {"input": torch.rand(rows, LENGTH, WIDTH)}
    live, predicted = live_and_predicted(blocks, batch, mesh, constraints=constraints)
    assert live <= predicted * 1.001
    assert predicted <= live * 1.04  # a process alone frees what a collective was handed at once


@pytest.mark.parametrize("mesh", ["2"], indirect=True)
def test_batches_of_half_precision_are_normalised_in_float32(mesh: DeviceMesh) -> None:
    model, batch = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), {"input": torch.rand(4, 3, 32, 32)}
    live, predicted = live_and_predicted(model, batch, mesh, constraints="ddp", precision="bf16")
    assert predicted == pytest.approx(live, rel=0.005)
