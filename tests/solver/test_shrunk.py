"""Columns removed by reduced cost exceed the limit, and the smaller program has the same optimum."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_relaxation import program
from thinned import thinned

from autopar.errors import TimeLimitError
from autopar.solver.linear import highs
from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.program import Program
from autopar.solver.search import incumbent
from autopar.solver.search import search as searching
from autopar.solver.search.branching import Branching
from autopar.solver.search.search import search
from autopar.solver.search.shrunk import part_of, within


@pytest.mark.parametrize(
    ("mesh", "part"),  # the last two cases take CBC long
    [((2,), 0.1), ((2,), 0.3), *(pytest.param((2, 2), part, marks=pytest.mark.slow) for part in (0.1, 0.3))],
    ids=str,
)
def test_the_part_has_the_optimum_of_the_whole(mesh: tuple[int, ...], part: float) -> None:
    asked = program(part, *mesh)
    everything = np.arange(len(asked.names))
    best = asked.integrate("cbc", everything, 60.0, 1e-9, {})
    root = asked.relax("highs", 60.0, {}, close=1e-3)
    kept = within(asked, root, best.objective * (1 + 1e-6))
    assert len(kept) < len(everything)
    shrunk = part_of(asked, kept)
    small = shrunk.program
    found = small.integrate("cbc", np.arange(len(kept)), 60.0, 1e-9, {})
    assert found.objective == pytest.approx(best.objective, rel=1e-6)
    relaxed = small.relax("highs", 60.0, {}, everything=True)
    assert relaxed.objective >= root.objective * (1 - 1e-9)
    assert root.basis is not None and relaxed.basis is not None
    for basis in (shrunk.basis(root.basis), shrunk.basis(shrunk.of_whole(relaxed.basis))):
        again = small.relax("highs", 60.0, {}, everything=True, basis=basis)
        assert again.objective == pytest.approx(relaxed.objective, rel=1e-7)
    values = np.zeros(len(everything))
    values[kept] = found.values
    matrix = asked.matrix()
    matrix.bound({})
    sums = np.bincount(matrix.row, matrix.value * values[matrix.column], minlength=matrix.lines)
    slack = 1e-5 * np.maximum(1.0, np.bincount(matrix.row, np.abs(matrix.value), minlength=matrix.lines))
    assert (sums >= matrix.least - slack).all()
    assert (sums <= matrix.most + slack).all()
    assert search(asked, gap=1e-7).objective == pytest.approx(best.objective, rel=1e-6)


def test_what_is_left_out_costs_more_than_the_limit() -> None:
    asked = program(0.3, 2)
    root = asked.relax("highs", 60.0, {}, close=1e-3)
    limit = root.objective * 1.05
    kept = within(asked, root, limit)
    everything = np.arange(len(asked.names))
    outside = np.setdiff1d(everything, kept).tolist()
    for variable in random.Random(0).sample(outside, 12):
        most = asked.upper[variable]
        forced = asked.integrate("cbc", everything, 60.0, 1e-9, {variable: (1.0, np.inf if most is None else most)})
        assert forced.status == "infeasible" or forced.objective >= limit * (1 - 1e-9)


def test_no_solution_in_the_part_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = program(0.3, 2, 2)
    best = search(asked, gap=1e-7)
    monkeypatch.setattr("autopar.solver.search.search._PART_MARGINS", (-1e-3, 1e-4, float("inf")))
    again = search(asked, gap=1e-7)
    assert again.status == "optimal"
    assert again.objective == pytest.approx(best.objective, rel=1e-6)


@pytest.mark.parametrize("in_time", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_far_from_the_relaxation_better_ones_are_looked_for_near_it(
    in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a known solution is far from the relaxation, a first search is limited to solutions near it; if it runs out of
    time, the search continues up to the known solution."""
    asked = program(0.3, 2, 2)
    best, everything = search(asked, gap=1e-7), np.arange(len(asked.names))
    cost, choices = asked.cost, asked.matrix().integer
    asked.cost = np.where(choices, -cost, 0.0)
    far = asked.integrate("highs", everything, 60.0, 1e-2, {})
    asked.cost = cost
    far = replace(far, status="feasible", objective=float(cost @ far.values), bound=0.0)
    assert far.objective > 1.1 * best.objective
    of_part, found = searching._of_part, []

    def looked(part: Any, basis: Any, known: Any, solver: str, gap: float, clock: Clock, limit: float) -> Outcome:
        if clock.limit < 60.0:  # the first search, which gets a share of the time
            found.append(limit)
            if not in_time:
                raise TimeLimitError("not in time")
        return of_part(part, basis, known, solver, gap, clock, limit)

    monkeypatch.setattr(searching, "_of_part", looked)
    monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", 0)
    monkeypatch.setattr(searching, "_MAX_PART_SHARE", 1.0)
    again = search(asked, gap=1e-7, best=far, first=asked.matrix().cheapest(1))
    assert again.status == "optimal"
    assert again.objective == pytest.approx(best.objective, rel=1e-6)
    assert len(found) >= (1 if in_time else 2)
    assert again.bound <= best.objective * (1 + 1e-6)


def test_a_search_ends_where_all_that_is_left_is_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, boxes, relax = program(0.3, 2, 2), [], Program.relax_again
    monkeypatch.setattr(Program, "relax_again", lambda *some, **named: boxes.append(1) or relax(*some, **named))
    best = search(asked, gap=1e-7)
    root = asked.relax("highs", 60.0, {}, everything=True)
    limits, many = [best.objective, (root.objective + best.objective) / 2], []
    assert root.objective < limits[1] < best.objective * (1 - 1e-6)
    for limit in limits:
        boxes.clear()
        found = Branching(asked, "highs", 1e-7, Clock(60.0, 60.0), limit=limit * (1 + 1e-9)).run(root)
        many.append(len(boxes))
        if limit == best.objective:
            assert found.objective == pytest.approx(best.objective, rel=1e-6)
        else:
            assert found.bound > limit
    assert many[1] < many[0]


@pytest.mark.parametrize("nodes", [0, 1])
def test_after_a_few_nodes_the_bound_holds(nodes: int) -> None:
    asked = program(0.3, 2, 2)
    best = search(asked, gap=1e-7)
    found = asked.integrate("highs", np.arange(len(asked.names)), 60.0, 1e-7, {}, nodes=nodes)
    assert found.status in ("stopped", "feasible")
    assert found.bound <= best.objective * (1 + 1e-6)
    assert found.objective >= best.objective * (1 - 1e-6)


@pytest.mark.parametrize(("part", "costs"), thinned(3, [0.0, 0.9, 0.6], [0.0, 0.05, 1.0]))
def test_the_relaxation_without_a_budget_leaves_the_optimum(
    part: float, costs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = program(part, 2, 2)
    best = search(asked, gap=1e-7)
    assert asked.budget is not None
    monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", 0)
    monkeypatch.setattr(searching, "_FIRST_BUDGET_MARGIN", costs)
    monkeypatch.setattr(searching, "_MAX_CHOICES_SHARE", (1.0, 1.0))
    found = searching._near_no_budget(asked, "highs", 1e-7, Clock(60.0, 60.0))
    relaxed = asked.relax("highs", 60.0, {}, everything=True).objective
    dear = relaxed * (1 + searching._NEXT_BUDGET_MARGIN)  # too costly for the kept columns
    assert found is not None or best.objective > dear
    assert found is not None or part < 0.9
    if found is not None:
        assert found.status == "optimal"
        assert found.objective == pytest.approx(best.objective, rel=1e-6)
        assert found.bound <= found.objective * (1 + 1e-9)
        assert found.objective == pytest.approx(float(asked.cost @ found.values), rel=1e-9)


def test_a_budget_that_costs_too_much_leaves_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", 0)
    monkeypatch.setattr(searching, "_MAX_CHOICES_SHARE", (1.0, 0.0))
    monkeypatch.setattr(searching, "_FIRST_BUDGET_MARGIN", 0.0)
    asked = program(0.3, 2, 2)
    assert searching._near_no_budget(asked, "highs", 1e-7, Clock(60.0, 60.0)) is None
    asked.budget = None
    assert searching._near_no_budget(asked, "highs", 1e-7, Clock(60.0, 60.0)) is None


def test_a_start_without_a_budget_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = program(0.3, 2, 2)
    best = search(asked, gap=1e-7)
    monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", 0)
    monkeypatch.setattr(highs, "_LIMITS", replace(highs._LIMITS, least=1, unperturbed_by_rows=0.0))
    assert searching._near_no_budget(asked, "highs", 1e-7, Clock(60.0, 60.0)) is None
    assert search(asked, gap=1e-7).objective == pytest.approx(best.objective, rel=1e-6)
