"""Recompute that is asked of a block whose input needs no gradient, or of parts that free nothing, is told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from toys import planned, stack

from autopar import Cluster, plan
from autopar.errors import InputError
from autopar.plans import Plan
from autopar.solver.idle import ConstraintWarning


class _Adapted(nn.Module):
    """A frozen product, and one of low rank beside it that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.base(x) + self.up(self.down(x))).sin()


def adapted(*constraints: str, frozen: bool = True) -> Plan:
    """Four such blocks behind an embedding."""
    model = nn.Sequential(nn.Embedding(8, 16), nn.Sequential(*(_Adapted() for _ in range(4))))
    model[0].requires_grad_(not frozen)
    inputs = {"input": torch.empty(64, 4, dtype=torch.long, device="meta")}
    return plan(model, inputs, Cluster.preset("cpu", (2,)), constraints=constraints, loss_fn=torch.sum)


WHY = r"'1\.0' is kept, since nothing before it is trained, .* not like '1\.1' and those behind"


@pytest.mark.parametrize("pattern", ["1.*", "*", "1.[01]"])
def test_a_pin_that_does_not_reach_the_first_block_says_why(pattern: str) -> None:
    text = f"recompute:{pattern} = full"
    with pytest.warns(ConstraintWarning, match=f"does not reach all it names: {WHY}") as found:
        made = adapted(text)
    assert text in str(found[0].message)
    assert made.recompute
    assert not [one for one in made.recompute if one.name.startswith("1.0")]


def test_one_that_names_it_alone_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=f"names nothing that can be recomputed: .* from '1.1' to '1.3'; {WHY}"):
        adapted("recompute:1.0 = full")


def test_nothing_is_told_where_every_block_is_reached_or_none_was_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstraintWarning)
        names = [one.name for one in adapted("recompute:1.* = full", frozen=False).recompute]
        assert names == ["1.0", "1.1", "1.2", "1.3"]
        adapted("recompute:1.* = never")
        adapted("recompute:1.2 = full")
        adapted("ddp(recompute=full)")  # is asked of the blocks that repeat


@pytest.mark.parametrize("text", ["recompute:blocks.*.up = full", "recompute:blocks.1.down = full"])
def test_a_part_that_keeps_only_what_it_reads_is_told(text: str) -> None:
    part = r"blocks\.0\.up" if "up" in text else r"blocks\.1\.down"
    with pytest.warns(
        ConstraintWarning, match=f"frees no activation: all that '{part}' keeps .* made before it"
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
