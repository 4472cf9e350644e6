"""Values that a loss function reads besides its arguments are compared in each call, like those of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.tracing import trace


class Weighted:
    """A loss with a weight that loops change."""

    share = 0.5

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.share * self.weight * F.mse_loss(output, target)

    def method(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


def _object(attribute: str) -> tuple[Any, Callable[[], None]]:
    loss = Weighted()
    return loss, lambda: setattr(loss, attribute, 0.1)


def _method(wrapped: bool) -> tuple[Any, Callable[[], None]]:
    loss = Weighted()
    return functools.partial(loss.method) if wrapped else loss.method, lambda: setattr(loss, "weight", 0.1)


def _module(inside: bool) -> tuple[Any, Callable[[], None]]:
    loss = nn.SmoothL1Loss()
    called = (lambda output, target: loss(output, target)) if inside else loss
    return called, lambda: setattr(loss, "beta", 0.1)


def _variable() -> tuple[Any, Callable[[], None]]:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 0.1

    return lambda output, target: weight * F.mse_loss(output, target), change


def _options(of: Any, change: Callable[[Any], None], read: Callable[[Any], Any]) -> tuple[Any, Callable[[], None]]:
    return lambda output, target: read(of) * F.mse_loss(output, target), lambda: change(of)


def _weights(before: torch.Tensor | None) -> tuple[Any, Callable[[], None]]:
    loss = nn.CrossEntropyLoss(weight=before)
    return loss, lambda: setattr(loss, "weight", torch.ones(3))


def _mode() -> tuple[Any, Callable[[], None]]:
    loss = nn.MSELoss()
    return loss, lambda: setattr(loss, "training", False)


CASES: dict[str, tuple[Callable[[], tuple[Any, Callable[[], None]]], str]] = {
    "module": (lambda: _module(False), "(loss_fn).beta"),
    "module around": (lambda: _module(True), "(loss_fn).loss.beta"),
    "buffer": (lambda: _weights(torch.ones(3)), "(loss_fn).weight"),
    "no buffer": (lambda: _weights(None), "(loss_fn).weight"),
    "mode": (_mode, "(loss_fn).training"),
    "object": (lambda: _object("weight"), "(loss_fn).weight"),
    "class": (lambda: _object("share"), "(loss_fn).share"),
    "method": (lambda: _method(False), "(loss_fn).weight"),
    "partial": (lambda: _method(True), "(loss_fn).weight"),
    "variable": (_variable, "(loss_fn).weight"),
    "dict around": (
        lambda: _options({"weight": 1.0}, lambda of: of.update(weight=0.1), lambda of: of["weight"]),
        "(loss_fn).of",
    ),
    "object around": (
        lambda: _options(Weighted(), lambda of: setattr(of, "weight", 0.1), lambda of: of.weight),
        "(loss_fn).of.weight",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_changed_value_is_seen(name: str) -> None:
    make, place = CASES[name]
    loss, change = make()
    model, inputs = nn.Linear(4, 3), {"input": torch.zeros(6, 4), "target": torch.zeros(6, 3)}
    look = trace(model, inputs, loss_fn=loss).plain_values.on(model)
    assert not look()
    change()
    assert list(look()) == [place]


class Own(nn.Module):
    """A model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.factor = nn.BatchNorm1d(4), 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(input)
        return normed

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.factor * F.mse_loss(output, target)


@pytest.mark.parametrize("bound", [True, False])
def test_what_is_the_models_own_is_seen_there(bound: bool) -> None:
    model, inputs = Own(), {"input": torch.zeros(6, 4), "target": torch.zeros(6, 4)}
    loss = model.loss if bound else lambda output, target: model.loss(output, target)
    look = trace(model, inputs, loss_fn=loss).plain_values.on(model)
    model.norm.running_mean = torch.ones(4)  # as when a model is moved
    model.eval()
    assert not look()
    model.factor = 0.5
    assert list(look()) == ["factor"]


def test_what_it_does_not_read_is_not() -> None:
    loss, model = Weighted(), nn.Linear(4, 3)
    log: list[float] = []

    def noted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log.append(1.0)
        return loss(output, target)

    inputs = {"input": torch.zeros(6, 4), "target": torch.zeros(6, 3)}
    look = trace(model, inputs, loss_fn=noted).plain_values.on(model)
    loss.name = "mean"  # type: ignore[attr-defined]
    log.append(2.0)
    assert not look()
