"""Rows that a mask of unknown contents selects are the same under any plan."""

from __future__ import annotations

import random

import pytest
import torch
from deviation import deviation
from picked_cases import PICKED, Model, batch
from random_plans import random_plan

from autopar.tracing import trace


@pytest.mark.parametrize("kind", PICKED)
def test_values_and_gradients_are_those_of_the_unsplit_model(kind: str) -> None:
    torch.manual_seed(0)
    model = Model(PICKED[kind])
    traced = trace(model, batch(0))
    for seed in range(5):
        model.zero_grad()
        inputs = batch(seed)
        plan = random_plan(traced.graph, model, (2,), random.Random(seed))
        # rounding where shards are summed
        rounded = torch.finfo(torch.half).eps if kind == "of_half_precision" else 1e-10
        assert deviation(model, inputs, traced, plan) < rounded
