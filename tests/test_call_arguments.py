"""The arguments of a call, in the form in which its plan takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Cluster, plan
from autopar.planning.call_arguments import sorted_arguments

X, Y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "others"),
    [
        (loss, {"target": Y}),
        (nn.CrossEntropyLoss(), {"target": Y}),
        (torch.mean, {}),
        (torch.Tensor.sum, {}),
        (None, {}),
    ],
)
def test_what_a_loss_takes_is_sorted_as_it_is_planned(
    loss_fn: Callable[..., Any] | None, others: dict[str, Any]
) -> None:
    model = nn.Linear(3, 4)
    examples, fixed = sorted_arguments(model, (X,), others, loss_fn)
    assert (examples, fixed) == ({"input": X, **others}, {})
    if loss_fn is not None:
        made = plan(model, examples, Cluster.preset("cpu", (2,)), loss_fn=loss_fn)
        assert made.nodes[-1].inputs[0].placements  # the loss
