"""Requested recompute that frees no memory causes a warning."""

from __future__ import annotations

import warnings

import pytest
from toys import planned, stack

from autopar.solver.constraints.idle_constraints import ConstraintWarning


@pytest.mark.parametrize("text", ["recompute:blocks.*.up = full", "recompute:blocks.1.down = full"])
def test_a_part_that_keeps_only_what_it_reads_is_told(text: str) -> None:
    part = r"blocks\.0\.up" if "up" in text else r"blocks\.1\.down"
    with pytest.warns(
        ConstraintWarning, match=f"saves no memory: all that '{part}' saves .* computed before it"
    ) as found:
        made = planned(stack(2), text)
    [told] = [one for one in found if one.category is ConstraintWarning]
    assert text in str(told.message)
    assert made.predicted.peak_bytes >= planned(stack(2)).predicted.peak_bytes


def test_parts_that_free_something_together_or_beside_others_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstraintWarning)
        planned(stack(2), "recompute:blocks.*.norm = full")
        planned(stack(2), "recompute:blocks.* = full", "recompute:blocks.*.norm = never")
        planned(stack(2), "recompute:blocks.*.down = full", "recompute:blocks.*.norm = full")
