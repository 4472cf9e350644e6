"""Modules that each call of forward creates cannot be leaves, since the next call creates others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import Cluster, UntraceableError, plan
from autopar.planning.leaf_requests import LeafWarning

TWO = Cluster.preset("cpu", shape=(2,))


class Halving(nn.Module):
    def forward(self, y):
        return y * float(y.detach().sum())


class Making(nn.Module):
    """Creates a module in each call, of a fixed class or of a class that the call creates too."""

    def __init__(self, kind: type[nn.Module] | None) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(4, 4), kind

    def forward(self, x):
        class Local(nn.Module):
            def forward(self, y):
                return y * float(y.detach().sum())

        return (self.kind or Local)()(self.first(x)).mean()


def test_a_function_of_a_module_that_each_call_makes_anew_is_the_leaf():
    with pytest.warns(LeafWarning, match=r"Halving\.forward \(function\) cannot be traced"):
        made = plan(Making(Halving), dict(x=torch.ones(4, 4)), TWO)
    assert "linear" in [node.name for node in made.nodes]


def test_forward_is_the_leaf_where_each_call_makes_the_class_anew():
    with pytest.raises(UntraceableError, match="'forward' would run whole"):
        plan(Making(None), dict(x=torch.ones(4, 4)), TWO)
