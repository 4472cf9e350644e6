"""User kernels read memory directly: a tensor that is contiguous in one process is contiguous under every plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deviation import deviation
from random_plans import random_plan
from torch import nn

from autopar.tracing import trace

Tensor = torch.Tensor
X = {"x": torch.rand(4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def places(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=x.dtype).view(x.shape)


def in_memory(x: Tensor) -> Tensor:
    """The elements in memory order, as a kernel sees them that gets an address."""
    return (x.as_strided((x.numel(),), (1,)) * places(x).flatten()).view(x.shape)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x) if x.is_meta else in_memory(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * places(gradient)


@torch.library.custom_op("autopar_tests::in_memory", mutates_args=())
def operator(x: Tensor) -> Tensor:
    return in_memory(x)


@operator.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


operator.register_autograd(lambda ctx, gradient: gradient * places(gradient))


class Model(nn.Module):
    def __init__(self, kernel: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kernel, self.weight = kernel, nn.Parameter(torch.rand(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.weight).reshape(2, 2, 8, 8).permute(1, 2, 3, 0).relu()
        return self.kernel(h.permute(3, 0, 1, 2).contiguous()).square().sum()


@pytest.mark.filterwarnings("ignore:.*(in_memory|Kernel)")  # has no rule
@pytest.mark.parametrize("kernel", [Kernel.apply, operator], ids=["autograd function", "operator"])
def test_a_kernel_is_given_contiguous_memory(kernel: Callable[[Tensor], Tensor]) -> None:
    for seed in (2, 3, 22, 25, 29, 30):
        model = Model(kernel)
        traced = trace(model, X)
        plan = random_plan(traced.graph, model, ((2,), (2, 2))[seed % 2], random.Random(seed))
        assert deviation(model, X, traced, plan) < 1e-12
