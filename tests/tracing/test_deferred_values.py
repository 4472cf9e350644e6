"""Known values too large to store are computed when they are asked for, if their inputs have not changed by then."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import InputError
from autopar.tracing import TraceError, UnknownDataError, known, trace
from autopar.tracing.contents.known import LIMIT

SIDE = 1 << 11  # a SIDE x SIDE mask exceeds the limit, one of its rows does not
assert SIDE * SIDE > LIMIT > SIDE


def wide(rows: torch.Tensor) -> torch.Tensor:
    return (rows[:, None] + torch.arange(SIDE)[None, :]) % 3


def of_a_row(x):
    row = wide(torch.arange(SIDE))[5]
    return x if (row == row[3]).any() and row.sum() == sum((5 + i) % 3 for i in range(SIDE)) else x * 2


def of_a_row_that_is_written(x):
    row = wide(torch.arange(SIDE))[5]
    row[row == 2] = 1
    return x if row.max() == 1 and row[1:3].max() == 1 else x * 2


def of_all_of_it(x):
    return x if wide(torch.arange(SIDE)).contiguous().max() == 2 else x * 2  # the same tensor


def of_a_large_mask(x):
    return x if torch.ones_like(x.expand(SIDE, SIDE, 3)).bool().all() else x * 2


def of_a_large_constant(x):
    return x if torch.ones(SIDE, SIDE).all() else x * 2


@pytest.mark.parametrize(
    "function", [of_a_row, of_a_row_that_is_written, of_all_of_it, of_a_large_mask, of_a_large_constant]
)
def test_a_branch_on_a_part_of_a_large_constant_is_decided(function):
    x = torch.randn(3)
    traced = trace(function, dict(x=x))
    assert torch.equal(traced.gm(x), x) and torch.equal(function(x), x) and not traced.reads_values


def after_the_large_one_is_written(x):
    mask = wide(torch.arange(SIDE))
    row = mask[5]
    mask[5] = x
    return x if row.max() == 2 else x * 2


def after_its_source_is_written(x):
    rows = torch.arange(SIDE)
    mask = wide(rows)
    rows.mul_(3)
    return x if mask[1].sum() == 0 else x * 2


def after_a_look_at_it_is_written(x):
    mask = wide(torch.arange(SIDE))
    row = mask[5]
    first = row[:SIDE]
    mask[5] = x
    return x if first.max() == 2 else x * 2


@pytest.mark.parametrize(
    "function", [after_the_large_one_is_written, after_its_source_is_written, after_a_look_at_it_is_written]
)
def test_what_was_written_meanwhile_is_not_known(function):
    with pytest.raises((UnknownDataError, TraceError), match=r"max|bool|branch"):
        trace(function, dict(x=torch.randint(9, (SIDE,))))


def test_what_is_read_through_a_large_value_of_a_known_input_is_guarded():
    def masked(x, rows):
        return x if wide(rows)[0, 0] == 0 else x * 2

    x, rows = torch.randn(3), torch.zeros(SIDE, dtype=torch.long)
    traced = trace(masked, dict(x=x, rows=known(rows)))
    traced.bind((), dict(x=x, rows=rows))
    assert traced.reads_values
    with pytest.raises(InputError):
        traced.bind((), dict(x=x, rows=rows - 5))


def test_a_large_known_input_is_known():
    def masked(x, mask):
        return x if mask[:, 3].all() else x * 2

    x, mask = torch.randn(3), torch.ones(SIDE, SIDE, dtype=torch.bool)
    traced = trace(masked, dict(x=x, mask=known(mask)))
    assert torch.equal(traced.gm(x, mask), x)
    with pytest.raises(InputError):
        traced.bind((), dict(x=x, mask=~mask))
