"""FLOPs of grouped convolutions: the same as those of one ungrouped convolution for each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autopar.ops.flops import TotalFlops


@pytest.mark.parametrize("groups", [1, 4, 24])
@pytest.mark.parametrize("trains", ["both", "weight", "input"])
@pytest.mark.parametrize("convolution", [F.conv1d, F.conv_transpose1d])
def test_groups_are_convolutions_of_their_own(convolution: Callable[..., Any], trains: str, groups: int) -> None:
    x = torch.empty(2, 24, 32, device="meta", requires_grad=trains != "weight")
    weight = torch.empty(24, 24 // groups, 4, device="meta", requires_grad=trains != "input")
    with TotalFlops() as together:
        convolution(x, weight, padding=2, groups=groups).sum().backward()
    with FlopCounterMode(display=False) as apart:
        for part, own in zip(x.detach().chunk(groups, 1), weight.detach().chunk(groups, 0), strict=True):
            given = part.requires_grad_(x.requires_grad), own.requires_grad_(weight.requires_grad)
            convolution(*given, padding=2).sum().backward()
    assert together.get_total_flops() == apart.get_total_flops() > 0
