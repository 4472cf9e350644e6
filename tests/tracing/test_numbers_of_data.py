"""Numbers that forward reads from tensors stay tensors in the graph, with the dtype promotion of Python numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import Made

from autopar import Cluster, UntraceableError, plan
from autopar.tracing import trace
from autopar.tracing.errors import UnknownDataError

Tensor = torch.Tensor


def filled(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[1:] = x.sum().item()
    made[0].fill_(x.max().item())
    return made


def changed_later(x: Tensor) -> Any:
    total = x.sum()
    read = total.item()
    total.mul_(2)
    return x * read, total, read


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "divided": lambda x: x / x.abs().sum().item(),
    "by a size": lambda x: x * (x.shape[0] / (1 + x.abs().max().item())),
    "a count": lambda x: x.sum() / (x > 0).sum().item(),
    "whole numbers divided": lambda x: (x > 0).sum().item() / x.shape[0] * x,
    "rounded down": lambda x: x * ((x > 0).sum().item() // 2 + (x > 0).sum().item() % 3),
    "compared": lambda x: torch.where(x > x.mean().item(), x, x * 2),
    "clamped": lambda x: x.clamp(max=x.max().item() / 2),
    "of half precision": lambda x: x.bfloat16().sum() * x.sum().item(),
    "of whole numbers": lambda x: (x > 0).long() * x.mean().item(),
    "as a tensor": lambda x: torch.tensor(x.mean().item()) + torch.tensor((x > 0).sum().item()),
    "to fill with": lambda x: {
        "new": x.new_full((2, 3), x.max()),
        "kept": torch.full((3,), x.new_tensor([2.5, 3.5])[1]) * x.new_full((2, 3), x.new_tensor([2, 3])[0]),
        "like": torch.full_like(x, (x > 0).sum()),
        "whole": torch.full((2,), fill_value=(x > 0).sum()),
    },
    "written": filled,
    "read before a write": changed_later,
    "whole numbers and others": lambda x: {
        "more": (x > 0).sum().item() * 0.3,
        "rest": (x > 0).sum().item() % 0.7,
        "root": (x > 0).sum().item() ** 0.5,
        "inverse": (1 + (x > 0).sum().item()) ** -1,
        "compared": (x > 0).sum().item() > 10.5,
    },
    "truth values": lambda x: {
        "sum": (x.sum() > 0).item() + (x.max() > 0).item() + (x.min() > 0).item(),
        "difference": (x.sum() > 0).item() - (x.max() > 0).item(),
        "negative": -(x.max() > 0).item(),
        "size": abs((x.max() > 0).item()),
    },
    "rounded": lambda x: {"mean": round(x.sum().item()), "both": [*divmod((x > 0).sum().item() - 30, 7)]},
    "bits": lambda x: {"odd": (x > 0).sum().item() & 1, "or": 8 | (x > 0).sum().item()},
    "of a type": lambda x: {"is": 1.0 if isinstance(x.mean().item(), float) else 2.0},
    "beside nothing": lambda x: {"is": x.sum().item() == None, "printed": [f"{x.sum().item():.2f}"][:0]},  # noqa: E711
    "returned": lambda x: {"mean": x.mean().item(), "count": [(x > 0).sum().item() + 1], "some": x.sum().item() > 0},
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_as_in_eager(kind: str) -> None:
    traced = trace(Made(COMPUTED[kind]), {"x": torch.randn(4, 6)})
    assert not traced.failures
    for seed in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        made, wanted = traced.gm(x), COMPUTED[kind](x)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
        if isinstance(wanted, dict):
            assert [type(value) for value in made.values()] == [type(value) for value in wanted.values()]
    assert not any(str(node.target) == "item" for node in traced.graph.nodes)


def test_python_s_own_numbers_are_not_read() -> None:
    told = r"float\(\) asks for the contents of a tensor .*: write \.item\(\), which .*, or give 'x' a known example"
    with pytest.raises(UnknownDataError, match=told):
        trace(Made(lambda x: x / float(x.sum())), {"x": torch.randn(4, 6)})


NOT_TOLD: dict[str, Callable[[Tensor], Any]] = {
    "to so many digits": lambda x: round(x.mean().item(), 4),
    "complex": lambda x: torch.complex(x, x).sum().item(),
    "a power that may be a fraction": lambda x: 2 ** (-(x > 0).sum().item()),
}


@pytest.mark.parametrize("kind", NOT_TOLD)
def test_what_cannot_be_told(kind: str) -> None:
    with pytest.raises(UnknownDataError, match=r"give (that input|'x') a known"):
        trace(Made(NOT_TOLD[kind]), {"x": torch.randn(4, 6)})


def test_a_size_that_is_data_names_what_decides() -> None:
    with pytest.raises(UnknownDataError, match=r"new_zeros .*\(it needs a number, .*\): give 'ids' a known example"):
        trace(lambda x, ids: x.new_zeros((2, ids.max())) + x.sum(), {"x": torch.randn(4), "ids": torch.arange(4)})


class Deciding(torch.nn.Module):
    """Branches on a buffer or on a parameter."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.weight = by, torch.nn.Parameter(torch.ones(6))
        self.register_buffer("done", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if getattr(self, self.by).sum() > 0 else x


@pytest.mark.parametrize("told", ["the buffer 'done', and planning reads only", "the parameter 'weight': choose with"])
def test_what_decides_is_no_input(told: str) -> None:
    with pytest.raises(UnknownDataError, match=f"it depends on {told}"):
        trace(Deciding(told.split("'")[1]), {"x": torch.randn(4, 6)})


@pytest.mark.parametrize("kind", ["whole numbers and others", "truth values"])
def test_to_the_last_digit_but_one(kind: str) -> None:
    traced, x = trace(Made(COMPUTED[kind]), {"x": torch.randn(4, 6)}), torch.randn(4, 6)
    for made, wanted in zip(traced.gm(x).values(), COMPUTED[kind](x).values(), strict=True):
        assert type(made) is type(wanted) and abs(made - wanted) <= 1e-15 * abs(wanted)


def test_an_op_that_takes_a_number_alone() -> None:
    model = Made(lambda x: torch.linspace(0.0, x.sum().item(), 6) * x)
    with pytest.raises(UntraceableError, match=r"linspace is given a number read.*test_numbers_of_data"):
        plan(model, {"x": torch.randn(4, 6)}, Cluster.preset("cpu", shape=(2,)))


def test_the_larger_of_two_is_that_of_python() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        count, total, most = (x > 0).sum().item(), x.sum(), x.max()
        return (
            x.sum() / max(count, 1)
            + max(1, (x > 2).sum()) * max(total, most)
            + min(total, 0.5) * max([count, 2.5])
            + max(0, most, total)
        )

    traced = trace(chosen, {"x": torch.randn(4, 6).double()})
    for x in (torch.randn(4, 6), -torch.ones(4, 6), torch.full((4, 6), 3.0), torch.zeros(4, 6)):
        given = [x.double().requires_grad_() for _ in range(2)]
        made, wanted = traced.gm(given[0]), chosen(given[1])
        grads = [torch.autograd.grad(out, one)[0] for out, one in zip((made, wanted), given, strict=True)]
        torch.testing.assert_close([made, grads[0]], [wanted, grads[1]], rtol=1e-12, atol=1e-12)


class Halved(torch.autograd.Function):
    """Halves until all is below one, as an adaptive integrator chooses its steps by data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.divisor = 1.0
        while x.abs().max().item() > ctx.divisor:
            ctx.divisor *= 2
        return x / ctx.divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / ctx.divisor


def test_an_autograd_function_that_reads_data_is_in_a_leaf() -> None:
    with pytest.raises(UnknownDataError, match=r"Halved needs the contents of .* give 'x' a known"):
        trace(Made(Halved.apply), {"x": torch.randn(4, 6)})
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), Made(lambda x: 4 * Halved.apply(x)))
    traced, x = trace(model, {"input": torch.randn(4, 6)}, unsupported="leaf"), 9 * torch.randn(4, 6)
    assert traced.failures
    grads = []
    for run in (traced.gm, model):
        model.zero_grad()
        run(x).sum().backward()
        grads.append(model[0].weight.grad.clone())
    assert torch.equal(*grads)
