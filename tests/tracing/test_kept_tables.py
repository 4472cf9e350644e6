"""Tables that forward derives from shapes and caches are no state, and cause no warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from autopar.tracing import trace
from autopar.tracing.attempt import Attempt


class Longer(nn.Module):
    """A table for the largest number of positions so far, and that number; values of the table are read."""

    def __init__(self, table: torch.Tensor | None) -> None:
        super().__init__()
        self.layer, self.length, self.table = nn.Linear(2, 2), 0 if table is None else len(table), table

    def forward(self, x):
        if self.table is None or self.length < x.shape[1]:
            self.length = x.shape[1]
            self.table = torch.arange(self.length)
        return self.layer(x)[:, : int(self.table[-1])] + self.table[: x.shape[1] - 1, None]


class Registered(Longer):
    """The table is a buffer, which is replaced before it is read."""

    def __init__(self) -> None:
        super().__init__(torch.arange(1))
        self.register_buffer("rates", torch.ones(1), persistent=False)

    def forward(self, x):
        if self.length < x.shape[1]:
            self.register_buffer("rates", torch.ones(x.shape[1]), persistent=False)
        return super().forward(x) * self.rates[0]


class Converted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(2, 2), torch.arange(2)

    def forward(self, x):
        self.table = self.table.to(x.dtype)
        return self.layer(x) + self.table


class Alike(nn.Module):
    """The mask is made from an input, but only from its shape and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(2, 2), None

    def forward(self, x):
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = (x.new_ones(x.shape[1], 2) + torch.zeros_like(input=x[0])).tril().type_as(x).to(x)
        return self.layer(x) * self.mask.expand_as(x)


class Begun(nn.Module):
    """Resets the attributes that it reads to their initial values, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aux, self.mask = nn.Linear(2, 2), 0.0, None

    def forward(self, x):
        self.aux, self.mask = 0.0, None
        for _ in range(2):
            if self.mask is None:
                self.mask = torch.ones_like(x)
            x = self.layer(x * self.mask)
            self.aux = self.aux + x.square().mean()
        return x


@pytest.fixture
def traces(monkeypatch):
    made, run = list[Attempt](), Attempt.run
    monkeypatch.setattr(Attempt, "run", lambda self: made.append(self) or run(self))
    return made


MODELS: dict[str, Any] = {
    "made": lambda: Longer(None),
    "longer": lambda: Longer(torch.arange(2)),
    "registered": Registered,
    "converted": Converted,
    "alike": Alike,
    "begun": Begun,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_table_is_no_state_and_is_not_told_of(name):
    model = MODELS[name]()
    before = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = trace(model, dict(x=torch.randn(3, 4, 2)))
    assert not traced.states
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == before


def test_a_later_trace_is_told_what_is_kept(traces):
    model = Longer(None)
    first = trace(model, dict(x=torch.randn(3, 4, 2)))
    assert len(traces) == 2
    trace(model.eval(), dict(x=torch.randn(3, 4, 2)), set_again=first.found_states.set_again)
    assert len(traces) == 3


def test_what_is_set_before_it_is_read_takes_no_second_trace(traces):
    traced = trace(Begun(), dict(x=torch.randn(3, 4, 2)))
    assert len(traces) == 1 and dict(traced.set_by_calls.names) == {"": "aux"}


@pytest.mark.parametrize("draw", [torch.rand_like, nn.functional.dropout])
def test_a_mask_that_is_drawn_once_is_a_state(draw):
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask = nn.Linear(2, 2), None

        def forward(self, x):
            if self.mask is None:
                self.mask = draw(torch.ones_like(x))
            return self.layer(x * self.mask)

    assert [*trace(Kept(), dict(x=torch.randn(3, 2))).states] == ["model.mask"]
