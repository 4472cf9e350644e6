"""A call that passes one tensor as two arguments uses the trace for two tensors, if that does the same."""

from __future__ import annotations

import torch
from torch import nn

from autopar.tracing import trace


class Making(nn.Module):
    """Forward creates the module that computes the loss, anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.MSELoss()(self.head(x), target)


def test_what_forward_makes_and_the_graph_does_not_name_is_no_difference():
    x = torch.randn(3, 4)
    model = Making()
    apart, together = (trace(model, {"x": x, "target": x}, same_inputs=same) for same in (False, True))
    assert together.inputs.same and together.does_as(apart)


def test_other_constants_are_one():
    class Adding(Making):
        def forward(self, x, target):
            return super().forward(x + torch.tensor(offset), target)

    x, model = torch.randn(3, 4), Adding()
    offset = [1.0, 2.0, 3.0, 4.0]
    apart = trace(model, {"x": x, "target": x})
    assert trace(model, {"x": x, "target": x}, same_inputs=True).does_as(apart)
    offset = [1.0, 2.0, 3.0, 5.0]
    assert not trace(model, {"x": x, "target": x}, same_inputs=True).does_as(apart)
