"""Arguments of leaves: values that generated code cannot represent, and modules that the graph does not know."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.leaf_calls import LeafCall
from autopar.tracing import Traced, trace
from autopar.tracing.leaves.tensors import show_leaf_tensors


class Kind(enum.Enum):
    DOUBLED = "doubled"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Options:
    factor: float = 2.0
    weight: torch.Tensor | None = None


class Gate(nn.Module):
    """Reads data, so that it becomes a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, of: Any) -> torch.Tensor:
        return x * self.scale * value_of(of, x) if float(x.detach().sum()) > -1e9 else x


def value_of(of: Any, x: torch.Tensor) -> Any:
    if isinstance(of, Options):
        return of.factor if of.weight is None else of.weight
    if isinstance(of, np.ndarray):
        return float(of.sum())
    if isinstance(of, Kind):
        return 2.0 if of is Kind.DOUBLED else 1.0
    return of(x) if callable(of) else of


class Net(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.body, self.part = nn.Linear(4, 4), nn.ModuleDict({"gate": Gate()})
        self.inner = Part(of, self.part["gate"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(self.body(x))
        return hidden


class Part(nn.Module):
    def __init__(self, of: Any, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.of = gate, of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.gate(x, of=self.of)
        return hidden


def _traced(of: Any) -> tuple[Traced, list[LeafCall], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(of), torch.randn(3, 4)
    traced = trace(model, {"x": x}, unsupported="leaf")
    calls: list[Any] = [node.target for node in show_leaf_tensors(traced)]
    return traced, calls, traced.gm(x), model(x)


@pytest.mark.parametrize(
    "of",
    [Kind.DOUBLED, Level.HIGH, Options(), np.ones(3), torch.sigmoid, lambda x: 2 * x, nn.Tanh(), float("inf"), 2.0],
    ids=lambda of: getattr(of, "__name__", type(of).__name__),
)
def test_plain_objects_are_handed_on(of: Any) -> None:
    _, [call], found, expected = _traced(of)
    assert isinstance(call.module, Gate)
    assert torch.equal(found, expected)


def _layer() -> nn.Module:
    return nn.Linear(4, 4)


def _weighted() -> Options:
    return Options(weight=torch.full((4,), 3.0))


def _bound() -> Any:
    return nn.Linear(4, 4).forward


def _around() -> Any:
    weight = torch.full((4,), 3.0)
    return lambda x: x * weight


def _partial() -> Any:
    return functools.partial(torch.add, torch.full((4,), 3.0))


@pytest.mark.parametrize("make", [_layer, _weighted, _bound, _around, _partial])
def test_who_hands_on_tensors_that_a_graph_does_not_know_is_the_leaf(make: Callable[[], Any]) -> None:
    of = make()
    traced, [call], found, expected = _traced(of)
    assert isinstance(call.module, Part)
    assert torch.equal(found, expected)
    if isinstance(of, nn.Module):
        assert {"of.weight", "of.bias", "gate.scale"} <= set(call.names)
    reason = traced.failures[call.module]
    assert f"Gate, which is one op, is handed a {type(of).__name__} with tensors" in reason
