"""`as_strided` is accepted where it means the same under every layout of the tensor, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import Made

from autopar.errors import UntraceableError
from autopar.tracing import trace

Tensor = torch.Tensor
X = torch.rand(8, 8)

TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "windows that overlap": lambda x: (x * 2).as_strided((3, 4, 8), (16, 8, 1)),
    "behind an offset": lambda x: torch.as_strided(x, (4, 4), (8, 1), 3),
    "a part, counted from its start": lambda x: x[2:].as_strided((2, 2), (8, 1)),
    "no elements": lambda x: x.as_strided((0, 9), (80, 8)),
    "made contiguous": lambda x: x.t().contiguous().as_strided((4, 4), (8, 1)),
    "transposed": lambda x: x.t().as_strided((4, 4), (8, 1)),
    "computed on permuted": lambda x: x.view(2, 4, 8).permute(1, 2, 0).relu().as_strided((4, 4), (8, 1), 5),
    "dims of one element": lambda x: x[:, None].transpose(0, 2).as_strided((4, 4), (8, 1)),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, 2:].as_strided((4, 4), (8, 1)),
    "a part, counted from the whole's start": lambda x: x[2:].as_strided((2, 2), (8, 1), 0),
    "past a part": lambda x: x[:2].as_strided((4, 8), (8, 1)),
    "past a part, by names": lambda x: torch.as_strided(x[:2], size=(4, 8), stride=(8, 1)),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_of_a_contiguous_tensor_s_own_elements(kind: str) -> None:
    torch.testing.assert_close(trace(Made(TAKEN[kind]), {"x": X}).gm(X), TAKEN[kind](X))


@pytest.mark.parametrize("kind", REFUSED)
def test_memory_that_a_plan_does_not_keep(kind: str) -> None:
    with pytest.raises(UntraceableError, match="under a plan a tensor may have memory of its own"):
        trace(Made(REFUSED[kind]), {"x": X})


def test_an_input_that_lies_otherwise_is_another_call() -> None:
    model = Made(lambda x: (x * 2).as_strided((4, 4), (8, 1)))
    traced = trace(model, {"x": X})
    assert traced.key(kwargs={"x": X.t()}) != traced.key(kwargs={"x": X})
    for x in (X, X.t()):
        torch.testing.assert_close(trace(model, {"x": x}).gm(x), model(x))


def test_an_input_that_is_a_part_of_another_tensor() -> None:
    model = Made(lambda x: x.as_strided((2, 2), (1, 2), 0))
    with pytest.raises(UntraceableError, match="a part of another"):
        trace(model, {"x": torch.arange(20.0)[10:]})
