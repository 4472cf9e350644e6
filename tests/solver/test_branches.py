"""Branching on the counts of recomputed blocks before any other variable does not change the optimum."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from toys import Stack, Toy, cluster, on_meta, toy

from autopar.cost.structure.levels import MOST
from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.program import Program
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.search import branching, incumbent, search
from autopar.solver.search.choices import Choices
from autopar.solver.seconds.objective import price, run
from autopar.solver.solution import read_solution


class Normed(Stack):
    """A stack whose first block also reads the result of a norm, as the others do, so that all blocks are folded."""

    def __init__(self, blocks: int, hidden: int = 64) -> None:
        super().__init__(blocks, hidden=hidden)
        self.embed = nn.Sequential(self.embed, nn.LayerNorm(16))


@functools.cache
def four(*mesh: int, inner_levels: int = MOST) -> tuple[Toy, float, float]:
    """Four blocks, with the smallest budget and the fastest plan's peak. Cached: tests change only the programs that
    they build from it."""
    problem = toy(on_meta(Normed, 4), torch.empty(512, 16, device="meta"), on=cluster(*mesh, seed=1))
    return problem, problem.smallest_budget(inner_levels=inner_levels), problem.predict(problem.solve()).peak_bytes


@pytest.mark.parametrize("mesh", [(2,), pytest.param((4,), marks=pytest.mark.slow)], ids=str)
def test_early_branches_change_no_optimum(mesh: tuple[int, ...]) -> None:
    problem, least, most = four(*mesh)
    for part in (0.9, 0.3, 0.02):
        found = []
        for branch in (True, False):
            model = Model(problem.problem())
            Rows(model, least + part * (most - least))
            assert model.program.records.counts
            if not branch:
                model.program.records.counts.clear()
            found.append(run(model, "highs", 60.0, 1e-7))
        assert found[0].objective == pytest.approx(found[1].objective, rel=1e-6)
        assert found[0].bound == pytest.approx(found[1].bound, rel=1e-6)


@pytest.mark.parametrize(
    ("mesh", "flows"),  # _FLOWS = 15,000: branch on integers; 0: branch on choices, which takes long on (2, 2)
    [((2,), 15_000), ((2,), 0), *(pytest.param((2, 2), n, marks=pytest.mark.slow) for n in (15_000, 0))],
    ids=str,
)
def test_large_programs_have_the_same_optimum(
    mesh: tuple[int, ...], flows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large programs fix a count and round its relaxation before they branch; with too many flows (more than `_FLOWS`)
    they branch on choices."""
    problem, least, most = four(*mesh)
    for part in (0.3, 0.02):
        found = []
        for few in (20_000, 0):
            monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", few)
            monkeypatch.setattr(incumbent, "_MAX_FLOWS_UNCUT", flows)
            monkeypatch.setattr(search, "_MAX_PART_SHARE", 0.0)
            model = Model(problem.problem())
            Rows(model, least + part * (most - least))
            found.append(run(model, "highs", 60.0, 1e-7))
        assert found[0].status == found[1].status == "optimal"
        assert found[0].objective == pytest.approx(found[1].objective, rel=1e-6)
        assert found[0].bound == pytest.approx(found[1].bound, rel=1e-6)


def test_what_is_left_is_solved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After several branchings without progress the rest is solved as one MIP; here already after the first branching
    that follows an incumbent."""
    at_once: list[float] = []

    class Watched(incumbent.Incumbent):
        def solve(self, node: Outcome, known_bound: float = -math.inf) -> bool:
            at_once.extend([known_bound] if known_bound > -math.inf else [])
            return super().solve(node, known_bound)

    monkeypatch.setattr(branching, "Incumbent", Watched)
    monkeypatch.setattr(branching, "_SPLITS_BEFORE_DIVE", 1)
    problem, least, most = four(2, 2)
    for part in (0.9, 0.6):
        found = []
        for splits in (16, 0):
            monkeypatch.setattr(branching, "_MAX_SPLITS", splits)
            model = Model(problem.problem())
            Rows(model, least + part * (most - least))
            found.append(run(model, "highs", 60.0, 1e-7))
        assert found[0].status == found[1].status == "optimal"
        assert found[0].objective == pytest.approx(found[1].objective, rel=1e-6)
    assert at_once, "nothing was left to be solved at once"


@pytest.mark.slow
def test_what_is_left_of_a_larger_program_is_begun_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS is started once on the remaining nodes: either it closes all of them, or the search continues as before."""
    bounds: list[tuple[float, bool]] = []

    class Watched(incumbent.Incumbent):
        def partial_solve(self, node: Outcome, part: float = 1.0, nodes: int | None = None) -> float:
            found = super().partial_solve(node, part, nodes)
            bounds.append((part, self.closed(found)))
            return found

    monkeypatch.setattr(branching, "Incumbent", Watched)
    monkeypatch.setattr(branching, "_SPLITS_BEFORE_DIVE", 1)
    monkeypatch.setattr(incumbent, "_MAX_VARIABLES_AT_ONCE", 0)
    problem, least, most = four(2, 2)
    for part in (0.6, 0.02):
        found = []
        for splits, nodes, far in ((16, 100, 1e-2), (1, 100, 1.0), (2, 100, 1.0), (1, 0, 1.0), (2, 0, 1.0)):
            monkeypatch.setattr(branching, "_MAX_SPLITS", splits)
            monkeypatch.setattr(incumbent, "_FIRST_NODES", nodes)
            monkeypatch.setattr(incumbent, "_FAR_GAP", far)
            model = Model(problem.problem())
            Rows(model, least + part * (most - least))
            found.append(run(model, "highs", 60.0, 1e-7))
        assert {one.status for one in found} == {"optimal"}
        assert [one.objective for one in found] == pytest.approx([found[0].objective] * len(found), rel=1e-6)
    assert {closed for share, closed in bounds if share < 1} == {True, False}


def test_above_its_limit_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """When part of a program is searched under a limit and an incumbent is known, however expensive, no node above the
    limit is explored: each such node counts as closed at the limit."""
    problem, least, most = four(2)
    model = Model(problem.problem())
    Rows(model, least + 0.3 * (most - least))
    price(model)
    program, asked = model.program, list[float]()
    root = program.root("highs", 60.0)
    limit = root.objective + 0.5 * (search.search(program, gap=1e-7).objective - root.objective)
    assert limit > root.objective * (1 + 1e-6)
    for name in ("integrate", "relax_again"):
        whole = getattr(Program, name)

        def noted(self: Program, *given: Any, whole: Any = whole, **named: Any) -> Outcome:
            asked.append(named.get("cutoff", math.inf))
            found: Outcome = whole(self, *given, **named)
            return found

        monkeypatch.setattr(Program, name, noted)
    known = replace(search.search(program, gap=1e-7), status="feasible")
    asked.clear()
    found = branching.Branching(program, "highs", 1e-7, Clock(60.0, 60.0), known, limit).run(root)
    assert found.status == "feasible"
    assert found.objective == known.objective
    assert limit <= found.bound < known.objective
    assert asked
    assert max(asked) == limit


@pytest.mark.parametrize(("part", "binds"), [(0.3, True), (2.0, False)])
def test_choices_are_told_apart_by_memory_where_it_binds(
    part: float, binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the budget does not bind, choices are compared by how much of their collectives is hidden (with flows)."""
    problem, least, most = four(2)
    made: list[bool] = []
    monkeypatch.setattr(branching, "Choices", lambda matrix, *, with_flows: made.append(with_flows) or Choices(matrix))
    model = Model(problem.problem())
    Rows(model, least + part * (most - least))
    price(model)
    program = model.program
    search_in = branching.Branching(program, "highs", 1e-3, Clock(60.0, 60.0))
    search_in.run(program.root("highs", 60.0))
    assert isinstance(search_in.choices, Choices)
    assert made == [not binds]


def test_a_passed_time_limit_still_gives_a_plan_that_fits() -> None:
    problem, least, most = four(2, 2)
    budget = least + 0.2 * (most - least)
    model = Model(problem.problem())
    Rows(model, budget)
    found = read_solution(model, run(model, "highs", 1e-3, 1e-7))
    assert problem.predict(found).peak_bytes <= budget
    assert found.bound <= found.seconds
    assert found.status in ("feasible", "optimal")


def test_all_blocks_may_recompute() -> None:
    """The row of what the last block saves less than those before it then has a negative right-hand side."""
    problem = toy(on_meta(Normed, 2, 512), torch.empty(4096, 16, device="meta"), on=cluster(2, seed=1))
    model = Model(problem.problem())
    Rows(model, None)
    [counts] = model.recomputed.values()
    r = counts[-1]
    model.program.lower[r] = 2.0
    found = run(model, "highs", 60.0, 1e-7)
    assert found.status == "optimal"
    assert found.values[r] == 2.0
