"""Pins of which later ones leave nothing, and what errors of pins tell."""

from __future__ import annotations

import pytest
import torch
from toys import Stack, Toy, cluster, on_meta, toy

from autopar.errors import InfeasibleError
from autopar.plans import Plan
from autopar.solver import make_plan


def _stack(blocks: int = 3) -> Toy:
    return toy(on_meta(Stack, blocks), torch.empty(512, 16, device="meta"), on=cluster(2))


def _plan(problem: Toy, *constraints: str) -> Plan:
    return make_plan(
        problem.graph,
        problem.restricted.strategies,
        problem.cluster,
        parameters=problem.memory.parameters,
        constraints=constraints,
    )


def test_of_pins_of_recompute_the_last_counts_where_something_is_left_of_the_others() -> None:
    problem = _stack(blocks=4)
    plan = _plan(problem, "recompute:blocks.* = full", "recompute:blocks.[01] = never")
    [repeat] = problem.repeats
    assert {segment.first for segment in plan.recompute} == {repeat.instance(i).start for i in (2, 3)}
    for texts in (
        ("recompute:blocks.* = full", "recompute:blocks.* = never"),
        ("recompute:blocks.[01] = never", "param:head.* = R", "recompute:blocks.* = full"),
    ):
        with pytest.raises(InfeasibleError, match="cannot hold together") as refused:
            _plan(problem, *texts)
        assert texts[0] in refused.value.message
        assert texts[-1] in refused.value.message
        assert "param" not in refused.value.message


def test_how_something_can_lie_is_told_where_that_is_short() -> None:
    with pytest.raises(InfeasibleError, match=r"has no way to lie so, only as R$"):
        _plan(_stack(), "input:* = S0")
