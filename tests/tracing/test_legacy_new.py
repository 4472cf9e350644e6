"""`Tensor.new` and constructors take sizes or data, which a graph does not distinguish: the trace equals eager."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_models import Made

from autopar.tracing import trace

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a Size": lambda x: x.new(x.shape).fill_(2.0),
    "a Size made of numbers": lambda x: x.new(torch.Size([3, 2])).zero_(),
    "sizes": lambda x: x.new(x.size(0), 1).fill_(2.0),
    "one size": lambda x: x.new(5).fill_(2.0),
    "a list": lambda x: x.new([1, 2.5, 4]),
    "lists": lambda x: x.new([[1.0, 2.0], [3.0, 4.0]]),
    "nothing": lambda x: torch.cat([x.new(), x[0]]),
    "a constructor, of data": lambda x: torch.Tensor([1e10, x.shape[1]]).to(x).expand(4, 2),
    "a constructor, of sizes": lambda x: torch.Tensor(2, x.size(0)).fill_(2.0),
    "a constructor, of an array": lambda x: torch.Tensor(np.ones(3)),
    "a constructor, of a tensor": lambda x: torch.DoubleTensor(x) + 1,
    "a constructor of integers": lambda x: x[torch.LongTensor([2, 0])],
    "a class of constructors": lambda x: x.type(torch.FloatTensor) + isinstance(x, torch.DoubleTensor),
}


@pytest.mark.parametrize("make", WAYS.values(), ids=list(WAYS))
def test_what_is_given_is_sizes_or_data_as_in_eager(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    traced = trace(Made(make), {"x": x})
    found, right = traced.gm(x), make(x)
    assert found.dtype == right.dtype and torch.equal(found, right)


def test_constructors_are_as_before_after_a_trace() -> None:
    before = torch.FloatTensor
    trace(Made(WAYS["a constructor, of data"]), {"x": torch.ones(4, 3)})
    assert "__new__" not in vars(torch.Tensor) and torch.FloatTensor is before
    assert torch.equal(torch.Tensor([1, 2]), torch.FloatTensor([1, 2])) and torch.Tensor(2, 3).shape == (2, 3)
