"""Recompute pins that later ones override completely, and the reasons that errors about pins give."""

from __future__ import annotations

import pytest
from toys import planned, stack

from autopar.errors import InfeasibleError


def test_of_pins_of_recompute_the_last_counts_where_something_is_left_of_the_others() -> None:
    problem = stack(2, blocks=4)
    plan = planned(problem, "recompute:blocks.* = full", "recompute:blocks.[01] = never")
    [repeat] = problem.repeats
    assert {segment.first for segment in plan.recompute} == {repeat.instance(i).start for i in (2, 3)}
    for texts in (
        ("recompute:blocks.* = full", "recompute:blocks.* = never"),
        ("recompute:blocks.[01] = never", "param:head.* = R", "recompute:blocks.* = full"),
    ):
        with pytest.raises(InfeasibleError, match="cannot hold together") as refused:
            planned(problem, *texts)
        assert texts[0] in refused.value.message
        assert texts[-1] in refused.value.message
        assert "param" not in refused.value.message


def test_how_something_can_lie_is_told_where_that_is_short() -> None:
    with pytest.raises(InfeasibleError, match=r"cannot have this layout, only R: inputs="):
        planned(stack(2), "input:* = S0")


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_each_fail_alone_the_one_that_is_named_has_its_own_reason(first: int) -> None:
    texts = ["param:head.weight = S0@2,S0", "param:blocks.0.up.weight = S1@2,S1"]
    with pytest.raises(InfeasibleError, match="cannot hold: '") as refused:
        planned(stack(2, 2), texts[first], texts[1 - first])
    constraint, _, reason = refused.value.message.partition(" cannot hold: ")
    assert constraint.partition(":")[2].split()[0] in reason
