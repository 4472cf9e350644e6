"""Autograd functions may take any object as argument; under a plan they get the same object."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from deviation import deviation
from random_plans import random_plan
from torch import nn

from autopar.fingerprints.fingerprint import fingerprint
from autopar.tracing import trace


@dataclass
class Settings:
    scale: float = 2.0


class Plain:
    scale = 3.0


class Kind(enum.IntFlag):
    FIRST = 1
    SECOND = 2


class Scaled(torch.autograd.Function):
    """The second argument is an object that determines the factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: Any) -> torch.Tensor:
        ctx.scale = how.scale if hasattr(how, "scale") else len(how) if isinstance(how, list) else int(how == how)
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


class Model(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.rand(4, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x @ self.weight, self.how).sum()


X = {"x": torch.rand(4, 4, dtype=torch.float64)}
OBJECTS: dict[str, Any] = {
    "dataclass": Settings(),
    "object": Plain(),
    "class": Plain,
    "in a list": [Settings(), {"plain": Plain()}],
    "flags": Kind.FIRST | Kind.SECOND,
    "number": Fraction(1, 2),
    "set": {1},
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_it_is_given_under_any_plan(kind: str) -> None:
    for seed in range(4):
        model = Model(OBJECTS[kind])
        traced = trace(model, X)
        plan = random_plan(traced.graph, model, (2,), random.Random(seed))
        assert deviation(model, X, traced, plan) < 1e-12


def test_ranks_have_objects_at_other_places() -> None:
    """Ranks have the objects at different addresses, and a saved plan is read by another process."""
    first, second = Plain(), Plain()
    one, other = (fingerprint(trace(Model(how), X).graph) for how in (first, second))
    assert one == other
