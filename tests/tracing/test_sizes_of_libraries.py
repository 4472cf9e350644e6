"""Sizes passed to libraries such as einops, which caches what it derives from shapes, and iterates over sets."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import einops
import pytest
import torch
from torch import nn

from autopar.fingerprints.fingerprint import fingerprint
from autopar.tracing import trace


@functools.lru_cache(maxsize=16)
def rows_of(shape: Sequence[int]) -> int:
    """A cached function: for equal shapes it returns symbolic numbers of the graph that was traced first."""
    return shape[0] * shape[1]


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(rows_of(x.shape), x.shape[2])).mean()


def test_numbers_that_a_cache_kept_of_another_trace_are_plain_ones() -> None:
    x = torch.randn(5, 7, 4)
    for model in (Cached(), Cached(), Cached().eval()):
        traced = trace(model, dict(x=x))
        traced.graph.lint()
        assert torch.equal(traced.gm(x), model(x))


class Ordered(nn.Module):
    """A product and a sum of sizes in the order of `names`, as an iteration over a set has them."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = dict(zip("bhw", x.shape, strict=False))
        product, total = 1, 0
        for name in self.names:
            product *= lengths[name] // 1
            total += lengths[name]
        return x.reshape(product, x.shape[3]) * total + lengths["w"] * lengths["h"]


@pytest.mark.parametrize("names", ["bwh", "hbw", "whb"])
def test_sums_and_products_are_the_same_nodes_in_every_order(names: str) -> None:
    x = torch.randn(2, 3, 5, 4)
    first, other = (trace(Ordered(some), dict(x=x)) for some in ("bhw", names))
    assert fingerprint(first.graph) == fingerprint(other.graph)
    more = torch.randn(6, 3, 5, 4)  # sizes read at run time
    assert torch.equal(other.gm(more), Ordered(names)(more))


def test_a_product_with_a_number_keeps_it() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = 2 * x.shape[1] * 3 * 0.5
            return torch.ones(2 * x.shape[0] * 3 + 1 + x.shape[1], int(half)) * x.shape[0] * 1

    model, x = Scaled(), torch.randn(2, 4)
    assert torch.equal(trace(model, dict(x=x)).gm(x), model(x))


def test_what_einops_has_kept_of_calls_before_makes_no_other_graph() -> None:
    class Rearranged(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return einops.rearrange(x, "b (n k) d -> b n (k d)", k=2).square().mean()

    model, x = Rearranged(), torch.randn(3, 4, 5)
    first = trace(model, dict(x=x))
    model(x)
    second = trace(model, dict(x=x))
    assert fingerprint(first.graph) == fingerprint(second.graph)
    torch.testing.assert_close(second.gm(x), model(x))
