"""Rows for the missing share of a bucket's latency, where one parameter is in the bucket in two layouts."""

from __future__ import annotations

import torch
from torch import nn
from toys import cluster, on_meta, planned, toy


class Penalised(nn.Module):
    """The loss also reads a layer's weight, whole; the layer's own use sums its gradient over the batch shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale).square().mean() + self.scale.square().mean()


def test_a_shard_can_be_read_in_two_layouts() -> None:
    problem = toy(on_meta(Penalised), torch.empty(16, 64, device="meta"), on=cluster(2))
    plan = planned(problem, "fsdp")
    assert all(p.storage[0].is_sharded for p in plan.parameters)
    assert {str(node.inputs[-1]) for node in plan.nodes if node.name in ("mul", "square_1")} == {"R+", "R"}
