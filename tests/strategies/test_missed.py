"""Discovery finds no ways to split that the table should have, and would find one that the table lacks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from missed import missed
from named_cases import NAMED
from rule_cases import CASES
from rule_tensors import name_of, x

from autopar.strategies.table import TABLE, Entry

EVERY = [*itertools.chain(*CASES.values(), *NAMED.values())]


def _parameter(number: int, case: tuple[Any, ...]) -> Any:
    """For every op the first case is quick; others, and convolutions, which take a minute, are slow."""
    name, before = name_of(case), any(other[0] is case[0] for other in EVERY[:number])
    return pytest.param(case, id=name, marks=[pytest.mark.slow] if name.startswith("conv") or before else [])


@pytest.mark.parametrize("case", [_parameter(number, case) for number, case in enumerate(EVERY)])
def test_the_table_misses_nothing(case: tuple[Any, ...]) -> None:
    assert missed(case).unexplained == []


def test_a_split_that_a_rule_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "cdist", Entry("cdist", "... m! d!, ... n d! -> ... m! n", anchor=True))
    assert "S1, R+ -> S1" in missed((torch.cdist, x(6, 4, 12), x(6, 12, 12))).unexplained


def test_an_op_that_draws_is_not_tried() -> None:
    found = missed((torch.rand_like, x(6, 12)))
    assert not found.tried
    assert found.ways == []
