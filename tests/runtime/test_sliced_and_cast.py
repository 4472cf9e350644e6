"""A value that is sliced and then cast equals one cast first, and only the slice is in memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.layout import Layout
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.convert import convert, recipe

WHOLE = Layout.parse("R, R")
LAYOUTS = ("S0, R", "R, S1", "S0, S1", "S0, S0@2", "S1@3, R", "S2, S1", "S2, S2@2")
SHAPE = (12, 24, 9)  # 2 ranks do not divide the last dim


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("coordinate", list(itertools.product((0, 1), repeat=2)))
def test_a_cast_slice_is_a_slice_of_the_cast(layout: str, order: tuple[int, ...], coordinate: tuple[int, int]) -> None:
    mesh = LocalMesh((2, 2), coordinate, ("a", "b"))
    given = torch.randn(SHAPE).permute(order)
    shape = tuple(given.shape)
    wanted = Layout.parse(layout)
    cast = recipe(WHOLE, wanted, shape, mesh, needs_grad=False, dtype=torch.bfloat16)
    alone = recipe(WHOLE, wanted, shape, mesh, needs_grad=False)
    found, expected = convert(given, cast), convert(given.to(torch.bfloat16), alone)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert found.untyped_storage().nbytes() <= 2 * found.numel()
