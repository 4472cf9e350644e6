"""With few blocks, storage and recompute are decided once more, block by block, where the budget binds."""

from __future__ import annotations

import pytest
import torch
from test_make_plan import _plan
from toys import Stack, Toy, cluster, on_meta, toy

from autopar.plans import Plan
from autopar.solver.each_block import MOST_BLOCKS

GAP = 1e-3


def _stack(blocks: int, seed: int) -> tuple[Toy, int]:
    """A stack, and a budget that is a little less than what its fastest plan takes."""
    x = torch.empty(2048, 64, device="meta")
    problem = toy(on_meta(Stack, blocks, 64, 256), x, on=cluster(4, seed=seed))
    return problem, int(0.96 * _plan(problem, memory_budget_bytes=1 << 40).predicted.peak_bytes)


def _storages(made: Plan) -> int:
    """How many storages one weight of the blocks has, at most: which weight it is may be a tie."""
    found: dict[str, set[str]] = {}
    for parameter in made.parameters:
        if parameter.name.startswith("blocks."):
            found.setdefault(parameter.name.split(".", 2)[2], set()).add(str(parameter.storage))
    return max(len(some) for some in found.values())


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_blocks_differ_where_that_is_faster(seed: int) -> None:
    problem, budget = _stack(3, seed)
    made, unfolded = (_plan(problem, memory_budget_bytes=budget, gap=GAP, fold=fold) for fold in (True, False))
    alike = problem.solve(budget, gap=GAP)
    assert _storages(made) > 1
    assert made.predicted.peak_bytes <= budget
    assert made.predicted.step_seconds < alike.seconds * (1 - GAP)
    assert unfolded.predicted.step_seconds <= made.predicted.step_seconds * (1 + GAP)
    assert made.certificate.bound <= made.certificate.objective == made.predicted.step_seconds


def test_many_blocks_stay_alike() -> None:
    problem, budget = _stack(MOST_BLOCKS + 1, 3)
    made = _plan(problem, memory_budget_bytes=budget, gap=GAP)
    assert made.predicted.peak_bytes <= budget
    assert _storages(made) == 1


def test_without_a_budget_that_binds_blocks_are_alike() -> None:
    problem, _ = _stack(3, 3)
    assert _storages(_plan(problem, memory_budget_bytes=1 << 40)) == 1
