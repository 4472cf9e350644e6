"""Relaxations by column generation equal CBC's with all columns, for any bounds on the counts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_branches import Normed, four
from toys import cluster, on_meta, toy

from autopar.solver.linear import engines, highs, relaxation
from autopar.solver.linear.highs import CUTOFF_REACHED, ITERATION_LIMIT, HighsSession
from autopar.solver.linear.outcome import Bounds
from autopar.solver.linear.pricing import bound_by, least_more
from autopar.solver.linear.program import Program
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.search import incumbent, search


def program(part: float, *mesh: int) -> Program:
    """Four blocks, recomputed as a whole; the budget is `part` of the way from the smallest to the fastest plan's."""
    problem, least, most = four(*mesh, inner_levels=0)
    model = Model(problem.problem(inner_levels=0))
    Rows(model, least + part * (most - least))
    model.program.cost = model.seconds.array(len(model.program.names)) / (model.reference() / 1000)
    return model.program


@pytest.mark.parametrize(
    ("part", "mesh"),
    [
        *((part, (2,)) for part in (-0.01, 0.0, 0.3)),
        (1.0, (2, 2)),
        *(pytest.param(part, (2, 2), marks=pytest.mark.slow) for part in (-0.01, 0.0, 0.3)),
        pytest.param(1.0, (2,), marks=pytest.mark.slow),
    ],
)
def test_few_columns_are_as_good_as_all(part: float, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxation, "_FIRST_FLOWS", 1)
    asked = program(part, *mesh)
    [(count, whether)] = asked.records.counts
    last = asked.relax("highs", 60.0, {})
    assert last.status == asked.relax("cbc", 60.0, {}).status
    if last.relaxation is None:
        assert part < 0
        return
    assert last.relaxation.inside.sum() < len(asked.names)
    ends = [(2.0, 2.0), (4.0, 4.0), (0.0, 0.0), (1.0, 3.0), (3.0, 3.0), (0.0, 4.0)]  # 0 removes entries of the matrix
    for low, high in itertools.chain(ends, reversed(ends)):
        bounds: Bounds = {count: (low, high), whether: (min(low, 1.0), min(high, 1.0))}
        whole, few = asked.relax("cbc", 60.0, bounds), asked.relax_again(last, 60.0, bounds)
        assert few.status == whole.status
        if whole.status == "optimal":
            assert few.objective == pytest.approx(whole.objective, rel=1e-6)
            last = few


@pytest.mark.parametrize("turn", [highs._LIMITS.perturbed_by_rows, 0.0])
@pytest.mark.parametrize("part", [-0.01, 0.0, 0.3, 1.0])
def test_presolve_changes_no_relaxation(part: float, turn: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether presolve solves the problem, proves infeasibility, or takes too long."""
    asked, ends = program(part, 2, 2), []
    whole = asked.relax("cbc", 60.0, {})
    monkeypatch.setattr(relaxation, "_FIRST_FLOWS", 1)
    monkeypatch.setattr(highs, "_MIN_ROWS_PRESOLVE", 0)
    limits = replace(highs._LIMITS, least=500 if turn else 10, perturbed_by_rows=turn)
    monkeypatch.setattr(highs, "_LIMITS", limits)
    solve = HighsSession._start_presolved
    monkeypatch.setattr(HighsSession, "_start_presolved", lambda some: ends.append(solve(some)) or ends[-1])
    found = asked.relax("highs", 60.0, {})
    assert (ends[0] == ITERATION_LIMIT) == (turn == 0.0)
    assert found.status == whole.status
    assert found.objective == pytest.approx(whole.objective, rel=1e-6)


def test_boxes_of_choices_go_on_from_what_highs_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """With unchanged columns and rows HiGHS only gets new bounds (warm start), and still finds each box's optimum."""
    asked, passed, pass_to = program(0.3, 2), list[int](), highs.pass_to
    monkeypatch.setattr(highs, "pass_to", lambda *given, **named: passed.append(1) or pass_to(*given, **named))
    last = whole = asked.relax("highs", 60.0, {}, everything=True)
    assert whole.status == "optimal"
    choices = np.flatnonzero(asked.matrix().integer & (whole.values > 0.01) & (whole.values < 0.99))
    choices = np.setdiff1d(choices, [one for count in asked.records.counts for one in count])[:3]
    assert len(choices) > 1
    for choice in choices.tolist():
        for end in (0.0, 1.0):
            bounds: Bounds = {choice: (end, end)}
            box = asked.relax_again(last, 60.0, bounds)
            assert box.objective == pytest.approx(asked.relax("cbc", 60.0, bounds).objective, rel=1e-6)
            last = box
    assert len(passed) == 1


def test_what_a_clock_ends_too_soon_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS measures wall-clock time, which goes on while other processes have the CPU; the limit is in CPU seconds."""
    asked = program(0.3, 2)
    least = asked.relax("cbc", 60.0, {}).objective
    monkeypatch.setattr(highs.PACE, "by_the_clock", lambda cpu: 1e-5 * cpu)
    assert asked.relax("highs", 60.0, {}).objective == pytest.approx(least, rel=1e-6)
    assert asked.relax("highs", 0.0, {}).status == "stopped"


def test_whole_numbers_end_with_their_cpu_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = program(0.3, 2)
    everything = np.arange(len(asked.names))
    assert asked.integrate("highs", everything, 60.0, 1e-4, {}).status == "optimal"
    seconds = itertools.chain([0.0, 0.0, 0.0], itertools.repeat(1e9))  # the time is over as soon as the solve has begun
    monkeypatch.setattr(engines, "cpu_seconds", lambda: next(seconds))
    assert asked.integrate("highs", everything, 60.0, 1e-4, {}).status in ("stopped", "feasible")


def test_the_whole_relaxation_is_solved_once_for_each_objective() -> None:
    asked = program(1.0, 2)
    first = asked.root("highs", 60.0)
    assert asked.root("highs", 60.0) is first
    asked.cost = 2 * asked.cost
    again = asked.root("highs", 60.0)
    assert again.objective == pytest.approx(2 * first.objective, rel=1e-6)
    assert asked.relax("highs", 60.0, {}).objective == pytest.approx(again.objective, rel=1e-6)


def test_flows_below_shared_conversions_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared conversion's row also holds `kept`, so while it is left out, no dual value of a choice prices it."""
    monkeypatch.setattr(relaxation, "_FIRST_FLOWS", 1)
    asked = Program()
    source, reader = ([asked.variable(name) for _ in range(2)] for name in "xy")
    for choices in (source, reader):
        asked.equal("one", [(variable, 1.0) for variable in choices], 1.0)
    kept = asked.variable("kept", lower=1.0)
    flows = asked.transport([[v] for v in source], [[v] for v in reader], np.ones((2, 2), dtype=bool))
    converted, paid = asked.variables("p", 2), asked.variables("p", 2)
    asked.implies("p", flows[[0, 1], [1, 0]], converted)
    asked.implies("p", converted, paid, [(kept, -1.0)], -1.0)
    asked.cost = np.zeros(len(asked.names))
    asked.cost[[source[1], reader[0]]], asked.cost[paid] = 10.0, 20.0
    for solver in ("cbc", "highs"):
        assert asked.relax(solver, 60.0, {}).objective == pytest.approx(10.0)


def test_what_two_flows_imply_is_paid_once() -> None:
    """Two flows out of one choice imply one conversion of cost 1: `least_more` may add no more than 1 to the bound of 0
    for any variable of the optimal solution."""
    asked = Program()
    source, *readers = ([asked.variable(name) for _ in range(2)] for name in "xyz")
    for choices in (source, *readers):
        asked.equal("one", [(variable, 1.0) for variable in choices], 1.0)
    both = [asked.transport([[v] for v in source], [[v] for v in ends], np.eye(2, dtype=bool)) for ends in readers]
    converted = asked.variables("p", 1)
    for flows in both:
        asked.implies("p", flows[[0], [0]], converted)
    asked.cost = np.zeros(len(asked.names))
    asked.cost[converted], asked.cost[source[1]] = 1.0, 10.0
    reduced = asked.cost.copy()
    reduced[[flows[0, 0] for flows in both]] = 1.0  # includes the price of the implied conversion
    assert asked.relax("cbc", 60.0, {}).objective == pytest.approx(1.0)
    more = least_more(asked.matrix(), reduced)
    assert more[[source[0], converted[0], *(flows[0, 0] for flows in both)]].max() == pytest.approx(1.0)


def test_products_lie_between_both_ends_of_a_box() -> None:
    asked = program(0.3, 2)
    [(count, whether)] = asked.records.counts
    root = asked.relax("highs", 60.0, {})
    assert sum(asked.wrong_products(root.values).values()) > 0.1
    for low, high in [(1.0, 4.0), (2.0, 3.0), (3.0, 3.0)]:
        bounds: Bounds = {count: (low, high), whether: (1.0, 1.0)}
        found = asked.relax_again(root, 60.0, bounds)
        products = asked.matrix().products
        ones = np.bincount(products.owner, found.values[products.ones], minlength=len(products.rows))
        least, most = products.within(bounds)
        assert (least > 0).any()
        assert (found.values[products.z] >= least * ones - 1e-6).all()
        assert (found.values[products.z] <= most * ones + 1e-6).all()
    assert sum(asked.wrong_products(found.values).values()) < 1e-3


@pytest.mark.parametrize(
    "box", [None, *(pytest.param(box, marks=pytest.mark.slow) for box in ((1.0, 3.0), (2.0, 2.0)))]
)
def test_reduced_costs_bound_what_a_variable_costs(box: tuple[float, float] | None) -> None:
    asked = program(0.3, 2, 2)
    [(count, whether)] = asked.records.counts
    bounds: Bounds = {} if box is None else {count: box, whether: (1.0, 1.0)}
    root = asked.relax("highs", 60.0, bounds)
    assert root.relaxation is not None
    outside = [v for v in range(len(asked.names)) if not root.relaxation.inside[v]]
    flows = [v for v in outside if asked.names[v] == "f"]
    others = [v for v in range(len(asked.names)) if asked.whole[v] and asked.upper[v] == 1.0]
    draw = random.Random(0)
    forced = [*draw.sample(flows, 12), *draw.sample(outside, 6), *draw.sample(others, 12)]
    more = least_more(asked.matrix(), root.reduced)
    assert any(root.reduced[v] > 0.01 * root.objective for v in forced)
    assert any(more[v] > root.reduced[v] + 0.01 * root.objective for v in forced)
    for variable in forced:
        assert root.reduced[variable] >= -1e-6 * root.objective or root.values[variable] != 0
        most = asked.upper[variable]
        with_it = asked.relax("cbc", 60.0, {**bounds, variable: (1.0, np.inf if most is None else most)}).objective
        assert with_it >= root.objective + max(root.reduced[variable], more[variable]) - 1e-6 * root.objective


def test_a_relaxation_that_is_whole_is_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = toy(on_meta(Normed, 4), torch.empty(512, 16, device="meta"), on=cluster(2, 2, seed=1)).problem()
    model = Model(problem)
    asked = model.program
    asked.cost = model.seconds.array(len(asked.names)) / (model.reference() / 1000)
    with monkeypatch.context() as patch:
        patch.setattr(Program, "as_whole", lambda *_: None)
        sought = search.search(asked, gap=1e-6)
    monkeypatch.delattr(Program, "integrate")
    found = search.search(asked, gap=1e-6)
    assert found.status == sought.status == "optimal"
    assert found.objective == pytest.approx(sought.objective, rel=1e-6)
    integers = found.values[asked.matrix().integer]
    assert np.abs(integers - integers.round()).max() < 1e-6


def test_leaving_out_by_ends_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = program(0.3, 2)
    monkeypatch.setattr(Program, "as_whole", lambda *_: None)
    few = search.search(asked, gap=1e-6)
    monkeypatch.setattr(incumbent, "least_more", lambda _, reduced: reduced)
    many = search.search(asked, gap=1e-6)
    assert few.objective == pytest.approx(many.objective, rel=2e-6)


@pytest.mark.parametrize(
    ("mesh", "from_last"),
    [((2,), False), ((2,), True), *(pytest.param((2, 2), way, marks=pytest.mark.slow) for way in (False, True))],
    ids=str,
)
def test_a_box_above_a_cutoff_is_closed(
    mesh: tuple[int, ...], from_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaxation, "_FIRST_FLOWS", 1)
    asked = program(0.3, *mesh)
    [(count, whether)] = asked.records.counts
    root = asked.relax("highs", 60.0, {})
    closed = 0
    for low, high in itertools.combinations_with_replacement(range(5), 2):
        bounds: Bounds = {count: (float(low), float(high)), whether: (min(low, 1.0), min(high, 1.0))}
        best = asked.relax("cbc", 60.0, bounds)
        optimum = best.objective if best.status == "optimal" else np.inf
        for cutoff in (root.objective * 1.001, root.objective * 1.1, optimum * 1.001):
            found = asked.relax_again(root, 60.0, bounds, cutoff=cutoff, from_last=from_last)
            if found.status == "closed":
                closed += 1
                assert cutoff <= found.bound <= optimum * (1 + 1e-7)  # the dual feasibility tolerance of HiGHS
            elif found.status == "optimal":
                assert found.objective == pytest.approx(optimum, rel=1e-6)
            else:
                assert found.status == best.status == "infeasible"
    assert closed


def test_a_box_above_a_cutoff_is_closed_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cold start, where HiGHS perturbs costs and therefore ignores the cutoff."""
    asked, statuses, solve = program(0.3, 2, 2), list[str](), HighsSession._start_cold_by_steps
    monkeypatch.setattr(relaxation, "_FIRST_FLOWS", 1)
    limits = {"least": 1, "warm_by_cold_start": 0.0, "warm_by_cold_start_in_box": 0.0}
    steps = (*[20] * 40, 10_000)
    monkeypatch.setattr(highs, "_LIMITS", replace(highs._LIMITS, **limits, cold_steps=steps))
    monkeypatch.setattr(
        HighsSession, "_start_cold_by_steps", lambda *some: statuses.append(solve(*some)) or statuses[-1]
    )
    [(count, whether)] = asked.records.counts
    root = asked.relax("highs", 60.0, {})
    ends = set[str]()
    for low, high in itertools.combinations_with_replacement(range(5), 2):
        bounds: Bounds = {count: (float(low), float(high)), whether: (min(low, 1.0), min(high, 1.0))}
        best = asked.relax("cbc", 60.0, bounds)
        optimum = best.objective if best.status == "optimal" else np.inf
        for cutoff in (root.objective * 0.9, root.objective * 1.01, np.inf):
            found = asked.relax_again(root, 60.0, bounds, cutoff=cutoff)
            ends.add(found.status)
            if found.status == "closed":
                assert cutoff <= found.bound <= optimum * (1 + 1e-7)
            else:
                assert found.status == best.status
                assert found.status == "infeasible" or found.objective == pytest.approx(optimum, rel=1e-6)
    assert ends == {"optimal", "infeasible", "closed"}
    assert {CUTOFF_REACHED, "Optimal"} <= set(statuses)


def test_any_dual_values_bound_the_optimum() -> None:
    asked, draw = program(0.3, 2, 2), np.random.default_rng(0)
    root = asked.relax("highs", 60.0, {})
    assert root.relaxation is not None
    matrix, inside = asked.matrix(), root.relaxation.inside
    matrix.bound({})
    _, _, duals = root.relaxation._session.answer()
    assert bound_by(matrix, inside, duals) == pytest.approx(root.objective, rel=1e-3)
    for _ in range(20):
        wrong = duals + draw.normal(size=len(duals)) * draw.choice([1e-3, 1e-1, 10.0])
        wrong[~matrix.awake(inside)] = 0.0
        assert bound_by(matrix, inside, wrong) <= root.objective * (1 + 1e-9)
