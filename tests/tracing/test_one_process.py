"""Collectives in the user's forward: a planned forward is that of one process, and sees a world size of 1."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce, get_world_size
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar import Cluster, UntraceableError, plan
from autopar.python.one_process import one_process
from autopar.tracing import trace

X = torch.ones(4, 3)


@pytest.fixture
def ranks() -> Iterator[int]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield 4
    dist.destroy_process_group()


class Counting(nn.Module):
    """Asks for the number of ranks, also by names imported before the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            all_reduce(x)
        return x * (10 * get_world_size() + dist.get_rank())


def test_forward_finds_that_it_is_alone(ranks: int) -> None:
    traced = trace(Counting(), dict(x=X))
    assert torch.equal(traced.gm(X), 10 * X)
    assert dist.get_world_size() == ranks and dist.get_rank() == 1


class Exchanging(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x)).sum()


class Reduced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        all_reduce(x)
        return x


class Asking(Reduced):
    """Cannot be traced, but neither may it be a leaf, which would run its collective on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().sum() > 0:
            x = x * 2
        return super().forward(x)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * dist.all_gather([torch.empty_like(x) for _ in range(4)], x))

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[:4]


class Differentiable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gathered.apply(x)


@pytest.mark.parametrize(
    ("layer", "name"), [(Reduced(), "all_reduce"), (Asking(), "all_reduce"), (Differentiable(), "all_gather")]
)
def test_what_exchanges_all_the_same_is_refused(ranks: int, layer: nn.Module, name: str) -> None:
    with pytest.raises(UntraceableError, match=rf"calls torch\.distributed\.{name}\(\).*one process.*is_initialized"):
        plan(Exchanging(layer), dict(x=X), Cluster.preset("cpu", (2,)))


def test_other_threads_keep_their_process_group(ranks: int) -> None:
    seen: list[int] = []
    with one_process():
        assert not dist.is_initialized()
        other = threading.Thread(target=lambda: seen.extend([dist.get_rank(), dist.get_world_size()]))
        other.start()
        other.join()
    assert seen == [1, ranks]
