"""A leaf with side effects besides its result: the module that calls it becomes the leaf, and contains them all."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.errors import UntraceableError
from autopar.tracing import trace

Tensor = torch.Tensor


class Odd(nn.Module):
    """Untraceable because NumPy decides; depending on `kind` it has other effects than its result."""

    seen: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.aux, self.many = nn.Linear(4, 4), kind, 0.0, list[Tensor]()
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        y = self.linear(x) * (1 + float(x.detach().numpy().mean() > 9))
        if self.kind == "list":
            beside.append(y.square().mean())
        elif self.kind == "dict":
            beside["inner"]["aux"] = y.square().mean()
        elif self.kind == "object":
            beside.aux = y.square().mean()
        elif self.kind == "input":
            x.mul_(2)
        elif self.kind == "handed on":
            return x
        elif self.kind == "its buffer":
            return self.seen
        elif self.kind == "attribute":
            self.aux = y.square().mean()  # type: ignore[assignment]
        elif self.kind == "list of its own":
            self.many[:] = [y.square().mean()]
        return y * self.seen


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.odd, self.kind = Odd(kind), kind

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1  # makes x a tensor of this module
        if self.kind == "list":
            found: list[Tensor] = []
            return self.odd(x, found) + sum(found)
        if self.kind == "dict":
            named: dict[str, dict[str, Tensor]] = {"inner": {}}
            return self.odd(x, named) + sum(named["inner"].values())
        if self.kind == "object":
            noted = SimpleNamespace(aux=0)
            return self.odd(x, noted) + noted.aux
        if self.kind == "written before":
            self.odd.seen.add_(1)
        elif self.kind == "bound before":
            self.odd.seen = self.odd.seen * 2
        y: Tensor = self.odd(x)
        if self.kind in ("handed on", "its buffer"):
            y += 1
            return x + y + self.odd.seen
        if self.kind == "written between":
            self.odd.seen.add_(1)
            y = self.odd(y)
        return y + x + self.odd.aux + sum(self.odd.many)


KINDS = [
    "attribute",
    "list of its own",
    "list",
    "dict",
    "object",
    "input",
    "handed on",
    "its buffer",
    "written before",
    "bound before",
    "written between",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_calls_it_is_the_leaf(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Around(kind), nn.Linear(4, 4))
    alone, x = copy.deepcopy(model), torch.randn(3, 4)
    traced = trace(model, {"input": x}, unsupported="leaf")
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["1"]
    for _ in range(2):
        torch.testing.assert_close(traced.gm(x), alone(x))
    torch.testing.assert_close(model[1].odd.seen, alone[1].odd.seen)


class Clipping(nn.Module):
    """Writes its own parameter, or draws a random number outside of torch."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.linear, self.draws = nn.Linear(4, 4), draws

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + float(x.detach().numpy().mean() > 9)
        if self.draws:
            return self.linear(x) * factor * np.random.rand()  # noqa: NPY002
        with torch.no_grad():
            self.linear.weight.clamp_(-0.05, 0.05)
        return self.linear(x) * factor


@pytest.mark.parametrize(("draws", "words"), [(True, "draws a number by rand"), (False, "writes into a parameter")])
def test_what_no_call_around_it_can_do_is_refused(draws: bool, words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Clipping(draws))
    before = model[1].linear.weight.detach().clone()
    with pytest.raises(UntraceableError, match=words):
        trace(model, {"input": torch.randn(3, 4)}, unsupported="leaf")
    assert torch.equal(model[1].linear.weight, before)


def test_what_is_only_read_is_none_of_it() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd("")

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.odd(x, {"inner": {"a": [1, 2]}})
            return y

    model, x = nn.Sequential(nn.Linear(4, 4), Reading()), torch.randn(3, 4)
    traced = trace(model, {"input": x}, unsupported="leaf")
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["1.odd"]
    torch.testing.assert_close(traced.gm(x), model(x))
