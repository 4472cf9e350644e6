"""Large neighbourhood search, which reoptimises a few ops at a time: feasible, never worse than the known solution."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pulp
import pytest
from test_branches import four
from test_relaxation import program
from toys import least_memory

from autopar.solver.linear import program as programs
from autopar.solver.linear.engines import engine
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.search import incumbent, windows
from autopar.solver.search.search import search
from autopar.solver.seconds.objective import run, run_near


def _is_solution(model: Model, values: Array) -> bool:
    matrix = model.program.matrix()
    matrix.bound({})
    sums = np.bincount(matrix.row, matrix.value * values[matrix.column], minlength=matrix.lines)
    slack = 1e-5 * np.maximum(1.0, np.bincount(matrix.row, np.abs(matrix.value), minlength=matrix.lines))
    within = (sums >= matrix.least - slack) & (sums <= matrix.most + slack)
    return bool(within.all() and (values[matrix.integer] == np.round(values[matrix.integer])).all())


@pytest.mark.parametrize(("mesh", "part"), [((2,), 0.3), pytest.param((2, 2), 0.02, marks=pytest.mark.slow)], ids=str)
def test_from_the_least_memory_to_nearly_the_best(mesh: tuple[int, ...], part: float) -> None:
    problem, least, most = four(*mesh)
    model = Model(problem.problem())
    Rows(model, least + part * (most - least))
    best = run(model, "highs", 60.0, 1e-4)
    smallest = least_memory(problem.problem())
    known = replace(smallest.outcome, objective=float(model.program.cost @ smallest.outcome.values))
    start = run_near(model, known, "highs", 1e-4, 0.0)  # no time: returns the solution that it starts from
    found = run_near(model, known, "highs", 1e-4, 8.0)
    assert best.objective * (1 - 1e-4) <= found.objective < start.objective
    assert found.objective <= 1.1 * best.objective
    assert _is_solution(model, found.values)
    again = run_near(model, replace(best, objective=float(model.program.cost @ best.values)), "highs", 1e-4, 8.0)
    assert again.objective == pytest.approx(best.objective, rel=2e-4)


def test_a_search_that_time_ends_looks_near_its_best_solution_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, whole, seen = program(0.02, 2, 2), incumbent.improved, list[tuple[Outcome, Outcome]]()

    def noted(program: Any, solver: str, gap: float, best: Outcome, seconds: float) -> Outcome:
        found = whole(program, solver, gap, best, 5.0)
        seen.append((best, found))
        return found

    monkeypatch.setattr(incumbent, "improved", noted)
    found = search(asked, time_limit=1e-3)
    [(first, better)] = seen
    assert found.status == "feasible"
    assert found.objective == better.objective <= first.objective
    assert found.bound <= found.objective


def test_windows_are_solved_without_the_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = program(0.02, 2, 2), list[dict[str, Any]]()

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return engine(*args, **options)

    best = search(asked, time_limit=1e-3)
    monkeypatch.setattr(programs, "engine", noted)
    windows.improved(asked, "highs", 1e-4, best, 1.0)
    assert seen
    assert all(options["aggregates"] is False for options in seen)


@pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")
def test_the_rule_that_is_off_is_the_aggregator(capfd: pytest.CaptureFixture[str]) -> None:
    """Presolve rules are numbered, and another version of HiGHS may number them differently."""
    problem, several = pulp.LpProblem("one"), [pulp.LpVariable(f"x{i}", 0, 2, "Integer") for i in range(3)]
    problem += pulp.lpSum(several) >= 1
    options = engine("highs", 60.0, 0.0, aggregates=False).optionsDict
    pulp.HiGHS(msg=True, presolve_rule_logging=True, **options).solve(problem)
    assert re.search(r"rules not allowed:\s+Rule \d+ .*: Aggregator\s", capfd.readouterr().out)
