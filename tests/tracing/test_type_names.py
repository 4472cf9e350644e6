"""`Tensor.type` by class and by name: the trace equals eager, on the device that is planned for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import Made

from autopar.tracing import trace

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as another tensor": lambda x: (x > 0).type(x.type()) * x,
    "a name": lambda x: x.type("torch.LongTensor"),
    "a name of another device": lambda x: x.type("torch.cuda.HalfTensor"),
    "a class": lambda x: x.type(torch.FloatTensor) + 1,
    "a dtype": lambda x: x.type(dtype=torch.int32),
}


def made_eagerly(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.half() if name == "a name of another device" else WAYS[name](x)  # a device that this machine may lack


@pytest.mark.parametrize("name", WAYS)
def test_a_type_is_a_dtype(name: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, right = trace(Made(WAYS[name]), {"x": x}).gm(x), made_eagerly(name, x)
    assert found.dtype == right.dtype and torch.equal(found, right)
