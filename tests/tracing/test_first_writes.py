"""Writes into parameters before these are read happen before the call; others are refused (`test_refused.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.fingerprints.fingerprint import fingerprint
from autopar.graph import FIRST_WRITES
from autopar.tracing import trace
from autopar.tracing.errors import UntraceableError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
Way = Callable[["Net"], None]


class Net(nn.Module):
    def __init__(self, way: Way, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.unread = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.arange(16.0).view(4, 4) % 3)
        self.register_buffer("hidden", torch.eye(4).bool())
        self.mask: torch.Tensor
        self.hidden: torch.Tensor
        if tied:
            self.b.weight = self.a.weight
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(x)
        self.way(self)
        return self.a(y).sum()


def clamped(net: Net) -> None:
    net.a.weight.data.clamp_(-0.1, 0.2)


def several(net: Net) -> None:
    net.a.weight.detach().mul_(2).clamp_(max=0.3)
    with torch.no_grad():
        net.a.bias.add_(1, alpha=2)


def averaged(net: Net) -> None:
    net.a.weight.data = net.a.weight.data * 0.9 + net.b.weight.data * (1 - 0.9)
    with torch.no_grad():
        net.a.bias.mul_(0.9).add_(net.b.bias, alpha=0.1)
        net.a.bias.lerp_(0.5 * net.b.bias, 0.3)


def copied(net: Net) -> None:
    with torch.no_grad():
        for mine, other in zip(net.a.parameters(), net.b.parameters(), strict=True):
            mine.copy_(other)


def masked(net: Net) -> None:
    net.a.weight.data *= net.mask
    net.a.weight.data = net.a.weight.data * net.mask
    net.a.weight.data.masked_fill_(net.hidden, 0.5)


def by_a_written_buffer(net: Net) -> None:
    net.a.weight.data *= net.mask
    net.mask.add_(1)


def in_part(net: Net) -> None:
    net.a.weight.data[0].clamp_(-0.1, 0.1)


def by_a_tensor(net: Net) -> None:
    net.a.weight.data.mul_(net.b.bias.detach())


def by_what_was(net: Net) -> None:
    before = net.a.weight.data * 2
    net.a.weight.data.mul_(3)
    net.a.weight.data.add_(before)


def and_kept(net: Net) -> None:
    before = net.a.weight.data * 2
    net.a.weight.data.add_(before)
    net.kept = before


def of_one_unread(net: Net) -> None:
    net.a.weight.data.copy_(net.unread.weight.data)


def of_one_written(net: Net) -> None:
    net.a.weight.data.add_(net.b.weight.data)
    net.b.weight.data.mul_(2)


def after_a_read(net: Net) -> None:
    net.b.weight.data.clamp_(-0.1, 0.1)


def by_its_norm(net: Net) -> None:
    net.a.weight.data.div_(net.a.weight.data.norm())


@pytest.mark.parametrize("way", [clamped, several, averaged, copied, masked])
def test_the_graph_does_what_the_model_does(way: Way) -> None:
    model = Net(way)
    other, traced = copy.deepcopy(model), trace(model, {"x": X})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    outputs = traced.gm(x=X), other(X)
    for output in outputs:
        output.backward()
    assert torch.equal(*outputs)
    for mine, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, right)
        if mine.grad is None or right.grad is None:
            assert mine.grad is right.grad
        else:
            assert torch.equal(mine.grad, right.grad)


def test_they_are_noted_in_order_and_leave_no_node() -> None:
    nodes = list(trace(Net(several), {"x": X}).graph.nodes)
    noted = {str(node.target): node.meta[FIRST_WRITES] for node in nodes if FIRST_WRITES in node.meta}
    assert noted == {
        "a.weight": (("mul_", (2,), ()), ("clamp_", (), (("max", 0.3),))),
        "a.bias": (("add_", (1,), (("alpha", 2),)),),
    }
    assert not any(str(node.target).endswith("_") for node in nodes if node.op == "call_method")


def test_graphs_with_other_writes_are_told_apart() -> None:
    prints = {
        fingerprint(trace(Net(lambda net, most=most: net.a.weight.data.clamp_(max=most)), {"x": X}).graph)  # type: ignore[misc]
        for most in (0.1, 0.2)
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    "way",
    [
        in_part,
        by_a_tensor,
        by_a_written_buffer,
        by_what_was,
        and_kept,
        of_one_unread,
        of_one_written,
        after_a_read,
        by_its_norm,
    ],
)
def test_other_writes_are_refused(way: Way) -> None:
    with pytest.raises(UntraceableError, match="forward writes into the parameter"):
        trace(Net(way), {"x": X})


def test_what_is_tied_to_one_that_was_read_is_refused() -> None:
    with pytest.raises(UntraceableError, match="forward writes into the parameter"):
        trace(Net(clamped, tied=True), {"x": X})
