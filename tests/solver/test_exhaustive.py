"""The program against exhaustive search on 500 random graphs of up to eight ops, 2x2 and 2x2x2 meshes, random budgets.

A seed that fails is in the name of its case: `pytest tests/solver/test_exhaustive.py -m "" -k "[17]"` runs it again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from random_graphs import (
    MOST_OPS,
    Fixed,
    Levelled,
    Tried,
    drawn,
    every_plan,
    is_with_blocks,
    read_bytes,
)
from tied_graphs import Tied
from toys import Toy

from autopar.errors import InfeasibleError
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.seconds.objective import run
from autopar.solver.solution import Solution

GRAPHS, QUICK, MOST_PLANS = 500, 8, 400
CBC = {*range(40), 65}
EQUAL = 1e-6  # relative tolerance on seconds: the feasibility tolerance of HiGHS

pytestmark = pytest.mark.timeout(0)  # pytest-timeout measures wall-clock time, which depends on the load of the machine


def cases(*, but: Sequence[int] = (), also: Sequence[int] = ()) -> list[Any]:
    """Seeds as test cases, of which few are not marked slow: the first `QUICK` without `but`, which take long, and
    `also`, which once failed."""
    quick = {*range(QUICK), *also} - set(but)
    return [pytest.param(seed, marks=[] if seed in quick else pytest.mark.slow) for seed in range(GRAPHS)]


def budgets(seed: int, plans: list[Tried]) -> list[float]:
    """The smallest budget with a plan, two random peaks of plans, and one budget that is no plan's peak.

    Peaks are multiples of four bytes and the last budget is two bytes from the next one: HiGHS satisfies rows to one
    byte.
    """
    draw = random.Random(f"budgets {seed}")
    peaks = sorted({plan.predicted.peak_bytes for plan in plans})
    assert not any(peak % 4 for peak in peaks)
    between = 4 * int(draw.uniform(peaks[0], peaks[-1]) / 4) + 2
    return [peaks[0], *(draw.choice(peaks) for _ in range(2)), between]


def solved(asked: Toy, budget: float | None, *, fold: bool, recompute: bool) -> Solution | None:
    try:
        found = asked.solve(budget, fold=fold, recompute=recompute)
    except InfeasibleError:
        return None
    predicted = asked.predict(found)
    assert found.seconds == pytest.approx(predicted.step_seconds, rel=1e-9, abs=1e-18)
    assert budget is None or predicted.peak_bytes <= budget
    return found


def check(asked: Toy, fixed: Fixed, plans: list[Tried], budget: float, *, recompute: bool) -> None:
    """The solution is feasible and optimal among the plans that the rows allow.

    Without recompute the rows equal the prediction. With it they may exceed the prediction (`solver.memory.rows`), at
    most by what `read_bytes` says of the recomputed blocks.
    """
    problem = fixed.problem
    folded = any(stage.count > 1 for stage in problem.stages)
    found = solved(asked, budget * (1 + 1e-9), fold=folded, recompute=recompute)
    limit = float("inf")
    if found is not None:
        limit = found.seconds * (1 - EQUAL)
        best = min(plan.predicted.step_seconds for plan in plans if plan.predicted.peak_bytes <= budget)
        assert found.seconds >= best * (1 - EQUAL)
    for plan in plans:
        if plan.predicted.step_seconds < limit and plan.predicted.peak_bytes <= budget:
            assert recompute, f"it fits and is faster: {plan}"
            counted = fixed.rows_bytes(plan)
            assert counted > budget * (1 + 1e-9), f"it fits and is faster: {plan}"
            more = read_bytes(asked, problem, plan)
            assert counted <= (plan.predicted.peak_bytes + more) * (1 + 1e-9)


@pytest.mark.parametrize("seed", cases(but=(3, 7)))
def test_the_optimum_is_that_of_exhaustive_search(seed: int) -> None:
    asked = drawn(seed, MOST_PLANS)
    problem = asked.problem(fold=False)
    fixed = Fixed(problem)
    ops = [node for node in asked.graph.nodes if node.op == "call_function"]
    assert len(ops) <= MOST_OPS
    plans = list(every_plan(asked, problem, recompute=is_with_blocks(seed)))
    kept = [plan for plan in plans if not any(map(any, plan.recomputed))]
    free = solved(asked, None, fold=False, recompute=False)
    assert free is not None
    assert free.seconds == pytest.approx(min(plan.predicted.step_seconds for plan in kept), rel=EQUAL)
    for budget in budgets(seed, kept):
        check(asked, fixed, kept, budget, recompute=False)
    if is_with_blocks(seed):
        for budget in budgets(seed, plans):
            check(asked, fixed, plans, budget, recompute=True)


@pytest.mark.parametrize("seed", cases(also=(10, 24))[:100])
def test_parameters_that_are_read_twice(seed: int) -> None:
    """A parameter may be read in one layout or in two; its bucket then holds both."""
    asked = drawn(seed, MOST_PLANS, Tied)
    problem = asked.problem(fold=False)
    fixed, plans = Fixed(problem), list(every_plan(asked, problem, recompute=False))
    free = solved(asked, None, fold=False, recompute=False)
    assert free is not None
    assert free.seconds == pytest.approx(min(plan.predicted.step_seconds for plan in plans), rel=EQUAL)
    for budget in budgets(seed, plans):
        check(asked, fixed, plans, budget, recompute=False)


@pytest.mark.parametrize("seed", cases(but=(1, 2, 3, 5, 6, 7), also=(65,))[:200])
def test_counts_of_nested_levels(seed: int) -> None:
    """As above, with equal blocks that share their choices; any number of them recomputes at each level."""
    asked = drawn(seed, 2 * MOST_PLANS, Levelled, fold=True)
    problem = asked.problem()
    fixed = Fixed(problem)
    plans = list(every_plan(asked, problem, recompute=True))
    for budget in budgets(seed, plans):
        check(asked, fixed, plans, budget, recompute=True)


@pytest.mark.parametrize("seed", cases(but=(0, 4, 6, 7))[:40])  # thousands of plans: half of the run time of this file
def test_levels_of_blocks_that_decide_for_themselves(seed: int) -> None:
    asked = drawn(seed, MOST_PLANS // 20, Levelled)
    problem = asked.problem(fold=False)
    fixed = Fixed(problem)
    plans = list(every_plan(asked, problem, recompute=True))
    for budget in budgets(seed, plans):
        check(asked, fixed, plans, budget, recompute=True)


@pytest.mark.parametrize("seed", [case for case in cases(but=range(2, QUICK), also=(65,)) if case.values[0] in CBC])
def test_cbc_finds_what_highs_finds(seed: int) -> None:
    """CBC gives no dual values, so the search splits boxes without them."""
    asked = drawn(seed, 2 * MOST_PLANS, Levelled, fold=True)
    for budget in budgets(seed, list(every_plan(asked, asked.problem(), recompute=True)))[1:3]:
        seconds = []
        for solver in ("highs", "cbc"):
            model = Model(asked.problem())
            Rows(model, budget * (1 + 1e-9))
            seconds.append(run(model, solver, 60.0, 1e-7).objective)
        assert seconds[0] == pytest.approx(seconds[1], rel=EQUAL)


def test_some_graphs_have_levels() -> None:
    depths = [max(s.depth for s in drawn(seed, 1, Levelled, fold=True).problem().stages) for seed in range(QUICK)]
    assert sum(depth > 1 for depth in depths) > QUICK / 2
    assert max(depths) > 2
