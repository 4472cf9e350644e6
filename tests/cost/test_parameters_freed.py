"""Planning keeps no references to parameters, so that their memory is free once shards have replaced them."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from autopar import Cluster, plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def test_replaced_parameters_are_freed_without_the_garbage_collector() -> None:
    model = Net()
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        plan(model, {"x": torch.empty(4, 8, device="meta")}, Cluster.preset("a100", (2,)))
        model.layer.weight, model.layer.bias = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4))
        assert [ref() for ref in old] == [None, None]
    finally:
        gc.enable()
