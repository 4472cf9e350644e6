"""Patterns match tied parameters by any of their names, and report parameters that the call does not read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import cluster

import autopar
from autopar import InfeasibleError, InputError


class Tied(nn.Module):
    """An embedding that is also the weight of the output layer, and a head that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.score.weight = self.words.weight
        self.later = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.words(ids)).square().mean()


def _plan(*constraints: str) -> autopar.Plan:
    with torch.device("meta"):
        model, ids = Tied(), torch.empty(8, 4, dtype=torch.long)
    return autopar.plan(model, {"ids": ids}, cluster(2), constraints=constraints, precision="fp32")


@pytest.mark.parametrize("name", ["words.weight", "score.weight", "score.*"])
@pytest.mark.parametrize("layout", ["R", "S0", "S1"])
def test_a_tied_parameter_goes_by_each_name(name: str, layout: str) -> None:
    [weight] = _plan(f"param:{name} = {layout}").parameters
    assert (weight.name, str(weight.storage)) == ("words.weight", layout)


def test_its_names_cannot_ask_two_layouts() -> None:
    with pytest.raises(InfeasibleError, match=r"words.weight = S0' and 'param:score.weight = R' cannot hold together"):
        _plan("param:words.weight = S0", "param:score.weight = R")


def test_one_that_the_call_does_not_read_is_told_of() -> None:
    with pytest.raises(InputError, match=r"matches nothing: this call does not read 'later.weight', which stays whole"):
        _plan("param:later.* = S0")
