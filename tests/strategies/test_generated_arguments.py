"""Rules whose text depends on arguments, over arguments and shapes that hypothesis makes: split equals whole."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.strategies.check import check
from autopar.strategies.examples import example

Tensor = torch.Tensor
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
SIZES = st.sampled_from((1, 2, 3, 4, 6, 12))
FEW = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@st.composite
def shaped(draw: Any, least: int = 1, most: int = 4) -> Tensor:
    return numbers(*draw(st.lists(SIZES, min_size=least, max_size=most)))


@st.composite
def regrouped(draw: Any) -> Call:
    x = draw(shaped())
    atoms = [p for n in x.shape for p in (_primes(n) or [1])]
    cuts = sorted(draw(st.sets(st.integers(0, len(atoms)), max_size=4)) | {0, len(atoms)})
    shape = [math.prod(atoms[a:b]) for a, b in pairwise(cuts)]
    if draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = -1
    return draw(st.sampled_from(("view", "reshape"))), (x, shape), {}


def _primes(n: int) -> list[int]:
    return {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 12: [2, 2, 3]}[n]


@st.composite
def indexed(draw: Any) -> Call:
    x = draw(shaped())
    key: list[Any] = []
    for n in x.shape:
        ends = sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=n > 0)))
        key.append(
            draw(
                st.sampled_from(
                    (slice(None), slice(None), slice(*ends), slice(ends[0], None), slice(None, None, 2), n - 1)
                )
            )
        )
    if draw(st.booleans()):
        key.insert(draw(st.integers(0, len(key))), None)
    if draw(st.booleans()):
        key = [*key[: draw(st.integers(0, len(key)))], Ellipsis]
    return operator.getitem, (x, tuple(key)), {}


@st.composite
def reduced(draw: Any) -> Call:
    x = draw(shaped())
    dims = tuple(draw(st.sets(st.integers(-x.dim(), x.dim() - 1), min_size=1, max_size=2)))
    dims = tuple({d % x.dim(): d for d in dims}.values())
    op = draw(st.sampled_from((torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp)))
    return op, (x,), {"dim": dims, "keepdim": draw(st.booleans())}


@st.composite
def along(draw: Any) -> Call:
    x = draw(shaped())
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    op = draw(
        st.sampled_from((F.softmax, F.log_softmax, torch.cumsum, torch.sort, torch.argmax, torch.unbind, torch.max))
    )
    return op, (x, dim) if op is not torch.sort else (x,), {} if op is not torch.sort else {"dim": dim}


@st.composite
def moved(draw: Any) -> Call:
    x = draw(shaped())
    a, b = (draw(st.integers(-x.dim(), x.dim() - 1)) for _ in range(2))
    order = tuple(draw(st.permutations(range(x.dim()))))
    return draw(
        st.sampled_from(
            [("transpose", (x, a, b), {}), ("permute", (x, *order), {}), (torch.movedim, (x, a, b), {}),
             ("unsqueeze", (x, a), {}), (torch.flip, (x, (a,)), {}), (torch.roll, (x, 1, a), {}), ("flatten", (x,), {})]
        )
    )  # fmt: skip


@st.composite
def cut(draw: Any) -> Call:
    x = draw(shaped())
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    n = x.shape[dim]
    cuts = sorted(draw(st.sets(st.integers(1, n), max_size=2)) | {n})
    lengths = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    start = draw(st.integers(0, n - 1))
    return draw(
        st.sampled_from(
            [("split", (x, lengths, dim), {}), ("split", (x, max(lengths), dim), {}), ("chunk", (x, 2), {"dim": dim}),
             ("narrow", (x, dim, start, draw(st.integers(1, n - start))), {}), ("select", (x, dim, start), {})]
        )
    )  # fmt: skip


@st.composite
def joined(draw: Any) -> Call:
    x = draw(shaped())
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    shape = list(x.shape)
    shape[dim] = draw(SIZES)
    if draw(st.booleans()):
        return torch.stack, ([x, numbers(*x.shape)],), {"dim": dim}
    return torch.cat, ([x, numbers(*shape)], dim), {}


@st.composite
def product(draw: Any) -> Call:
    m, k, n, batch = (draw(SIZES) for _ in range(4))
    left = draw(st.sampled_from(((k,), (m, k), (batch, m, k), (1, m, k), (batch, 1, m, k))))
    right = draw(st.sampled_from(((k,), (k, n), (batch, k, n))))
    return torch.matmul, (numbers(*left), numbers(*right)), {}


@st.composite
def convolved(draw: Any) -> Call:
    groups = draw(st.sampled_from((1, 2, 4)))
    channels, out = groups * draw(st.sampled_from((1, 2, 3))), groups * draw(st.sampled_from((1, 2, 3)))
    bias = numbers(out) if draw(st.booleans()) else None
    options = {"stride": draw(st.sampled_from((1, 2))), "padding": draw(st.sampled_from((0, 1))), "groups": groups}
    return torch.conv1d, (numbers(draw(SIZES), channels, 6), numbers(out, channels // groups, 3), bias), options


@st.composite
def classified(draw: Any) -> Call:
    rows, classes = draw(SIZES), draw(st.sampled_from((4, 6, 12)))
    labels = torch.randint(0, classes, (rows,))
    ignored = draw(st.sampled_from((-100, int(labels[0]))))
    if ignored != -100 and bool((labels == ignored).all()):
        ignored = -100  # a mean of nothing is nan
    options: dict[str, Any] = {"ignore_index": ignored, "reduction": draw(st.sampled_from(("mean", "sum", "none")))}
    if draw(st.booleans()):
        options["label_smoothing"] = 0.1
    if draw(st.booleans()):
        options["weight"] = torch.rand(classes, dtype=torch.float64) + 0.5
    return F.cross_entropy, (numbers(rows, classes), labels), options


@st.composite
def gathered(draw: Any) -> Call:
    x = draw(shaped(2, 3))
    dim = draw(st.integers(-x.dim(), x.dim() - 1))
    shape = [draw(st.sampled_from(sorted({n, max(n // 2, 1)}))) for n in x.shape]
    index = torch.randint(0, x.shape[dim], shape)
    if draw(st.booleans()):
        return torch.gather, (x, dim, index), {}
    return torch.scatter_add, (x, dim, index, numbers(*shape)), {}


CALLS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (regrouped, indexed, reduced, along, moved, cut, joined, product, convolved, classified, gathered)
}


@pytest.mark.parametrize("family", CALLS)
def test_split_equals_whole(family: str, ranks: Any) -> None:
    @FEW
    @given(CALLS[family]())
    def run(call: Call) -> None:
        target, args, kwargs = call
        node, tensors = example(target, *args, **kwargs)
        for mesh_shape in ((2,), (2, 3)):
            check(node, tensors, mesh_shape, ranks=ranks, most=8)

    run()
