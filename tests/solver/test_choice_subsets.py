"""Lower bounds on each way (choice of an op) by message passing, and the fastest plan with the few ways they leave."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_graphs import drawn, every_plan
from small_models import ready, toy_of
from test_branches import four
from toys import least_memory

from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.program import Program
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.search import pruning, under_budget
from autopar.solver.search.choice_subsets import ProblemChoices, restricted_to
from autopar.solver.search.network import Network
from autopar.solver.search.pruning import Pruner, weigh
from autopar.solver.search.smallest import LeastMemory
from autopar.solver.search.under_budget import fastest_near, fastest_within
from autopar.solver.seconds.objective import in_seconds, price, run
from autopar.solver.seconds.stars import MOST, Arm, Star
from autopar.solver.solution import read_solution

GRAPHS, QUICK, MOST_PLANS = 200, 12, 400
FAR = 1.05  # largest ratio to the optimum of a plan that is decoded from messages alone
SMALL = ["gpt2-4", "llama-6-grouped", "bert-4", "t5-4", "vit-4"]
slow = pytest.mark.slow


def problem_of(name: str, *mesh: int) -> Problem:
    return toy_of(ready(name, *mesh)).problem(recompute=False)


@pytest.mark.parametrize("uses", range(1, MOST + 1))
@pytest.mark.parametrize("seed", range(6))
def test_what_a_star_costs_at_least_is_that_of_all_its_ends(seed: int, uses: int) -> None:
    draw = np.random.default_rng(seed)
    rows, columns = 3, 4
    price = np.where(draw.random((rows, columns)) < 0.2, np.inf, draw.integers(0, 5, (rows, columns)).astype(float))
    price[:, 0] = 1.0
    arms = [Arm(0, np.arange(rows), draw.normal(size=rows))]
    for k in range(uses):
        message = draw.normal(size=columns)
        message[1:][draw.random(columns - 1) < 0.3] = -np.inf  # columns that no arm can take
        own = draw.random((rows, columns)) if draw.random() < 0.5 else None
        arms.append(Arm(k + 1, np.arange(columns), message, own))
    star, least = Star(price, arms), [np.full(len(arm.message), np.inf) for arm in arms]
    for row, *wanted in itertools.product(range(rows), *(range(columns) for _ in range(uses))):
        if any(np.isinf(arm.message[w]) for arm, w in zip(arms[1:], wanted, strict=True)):
            continue
        cost = sum(price[row, w] for w in set(wanted)) - arms[0].message[row]
        for arm, w in zip(arms[1:], wanted, strict=True):
            cost += (0.0 if arm.own is None else arm.own[row, w]) - arm.message[w]
        for mine, arm, place in zip(least, arms, (row, *wanted), strict=True):
            mine[place] = min(mine[place], cost + arm.message[place])
    for end, arm in enumerate(arms):
        there = np.isfinite(arm.message)
        assert star.least(end)[there] == pytest.approx(least[end][there])
    assert star.bound() == pytest.approx(float((least[0] - arms[0].message).min()))


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < QUICK else slow) for n in range(GRAPHS)])
def test_no_plan_costs_less_than_its_choices_say(seed: int) -> None:
    asked = drawn(seed, MOST_PLANS, fold=True)
    problem = asked.problem(recompute=False)
    plans = list(every_plan(asked, problem, recompute=False))
    best = min(plan.predicted.step_seconds for plan in plans)
    network = Network(problem)
    network.climb()
    model = Model(problem)
    first = network.bound
    weigh(network, model, "highs", 60.0)
    assert network.bound >= first
    assert network.bound <= best * (1 + 1e-7)
    for plan in plans:
        says = max(least[choice] for least, choice in zip(network.least, plan.choices, strict=True))
        assert plan.predicted.step_seconds >= says * (1 - 1e-7)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2-4", (2, 4)),
        *(
            pytest.param(name, mesh, marks=slow)
            for name, mesh in [("t5-4", (2, 4)), *((name, (2, 2, 2)) for name in SMALL)]
        ),
    ],
    ids=str,
)
def test_the_bound_is_near_that_of_the_relaxation(name: str, mesh: tuple[int, ...]) -> None:
    problem = problem_of(name, *mesh)
    model, network = Model(problem), Network(problem)
    price(model)
    relaxed = in_seconds(model, model.program.relax("highs", 60.0, {}))
    network.climb()
    weigh(network, model, "highs", 60.0)
    best = run(model, "highs", 60.0, 1e-6).objective
    assert 0.99 * relaxed.bound <= network.bound <= best * (1 + 1e-7)


@pytest.mark.parametrize("pairs", [(2_000, 4_000, 8_000), pytest.param((20_000, 40_000, 80_000), marks=slow)], ids=str)
@pytest.mark.parametrize(
    ("name", "mesh", "solver"),
    [
        ("gpt2-4", (2, 2), "highs"),
        pytest.param("t5-4", (2, 2), "highs", marks=slow),
        pytest.param("gpt2-4", (2, 2), "cbc", marks=slow),
        *(pytest.param(name, (2, 2, 2), "highs", marks=slow) for name in SMALL),
    ],
    ids=str,
)
def test_few_ways_have_the_optimum_or_say_how_far_they_are(
    name: str, mesh: tuple[int, ...], solver: str, pairs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, gap = problem_of(name, *mesh), 1e-4
    whole = run(Model(problem), "highs", 60.0, gap)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_ALL_CHOICES", 0)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_RESTRICTED", pairs)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_PROOF", 0)
    model, found = Pruner(solver, gap).free(problem, 60.0)
    assert len(model.program.names) < len(Model(problem).program.names)
    assert found.bound <= whole.objective * (1 + 1e-7)
    assert found.objective >= whole.bound * (1 - 1e-7)
    if found.status == "optimal":
        assert found.objective <= whole.objective * (1 + 2 * gap)
        assert found.bound >= found.objective * (1 - gap)
    else:
        assert found.objective <= whole.objective * 1.05


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gpt2-4", "vit-4") else [slow]) for name in SMALL]
)
def test_a_plan_is_read_from_what_is_known_of_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With larger programs disabled, the decoded plan is the result, with the bound of the messages."""
    problem = problem_of(name, 2, 2)
    network = Network(problem)
    network.climb()
    read, before = network.decoded(), network.bound
    assert all(some.sum() == 1 for some in read)
    network.climb()
    assert network.bound >= before, "reading it took something from the messages"
    monkeypatch.setattr(pruning, "_MAX_FLOWS_ALL_CHOICES", 0)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_CHEAPEST", 0)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_RESTRICTED", (1,))
    monkeypatch.setattr(pruning, "_MAX_FLOWS_PROOF", 0)
    model, found = Pruner("highs", 1e-9).free(problem, 60.0)
    assert all(len(op.choices) == 1 for op in model.problem.ops)
    assert chosen_alike(model.problem, restricted_to(problem, read))
    assert before * (1 - 1e-9) <= found.bound <= found.objective
    best = run(Model(problem), "highs", 60.0, 1e-4)
    assert best.bound * (1 - 1e-7) <= found.objective <= FAR * best.objective
    assert found.bound <= best.objective * (1 + 1e-7)


def chosen_alike(one: Problem, other: Problem) -> bool:
    return all(a.choices == b.choices for a, b in zip(one.ops, other.ops, strict=True))


def test_a_program_that_is_sure_to_prove_a_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further program closes the gap that few ways leave; without enough memory for it, their plan is kept."""
    problem, gap, seen = problem_of("t5-4", 2, 2), 1e-4, list[int]()
    monkeypatch.setattr(pruning, "_MAX_FLOWS_ALL_CHOICES", 0)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_RESTRICTED", (1_500, 1_600))
    for sure, largest in ((0, None), (1 << 60, None), (1 << 60, 1)):

        def run_or_fail(model: Model, *args: Any, largest: int | None = largest, **options: Any) -> Outcome:
            seen.append(len(model.program.names))
            if largest is not None and len(seen) > largest:
                raise MemoryError
            return run(model, *args, **options)

        seen.clear()
        monkeypatch.setattr(pruning, "_MAX_FLOWS_PROOF", sure)
        monkeypatch.setattr(pruning, "run", run_or_fail)
        _, found = Pruner("highs", gap).free(problem, 60.0)
        assert found.status == ("optimal" if sure and largest is None else "feasible")
        assert (max(seen) > 2 * seen[0]) == (sure > 0)


@pytest.mark.parametrize(("pairs", "expected"), [((1_500, 1_600, 1_700), [6, 6, 60]), ((1_500, 1 << 30), [6, 60])])
def test_plans_of_few_ways_leave_time_for_a_proof(
    pairs: tuple[int, ...], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining time is for the last program, or for one with all ways that a better plan can use."""
    problem, times = problem_of("gpt2-4", 2, 2, 2), []
    monkeypatch.setattr(pruning, "_MAX_FLOWS_ALL_CHOICES", 0)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_RESTRICTED", pairs)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_PROOF", 0)
    monkeypatch.setattr(pruning, "cpu_seconds", lambda: 0.0)

    def run_without_proof(model: Model, solver: str, time_limit: float, *given: Any, **more: Any) -> Outcome:
        times.append(time_limit)
        return replace(run(model, solver, 60.0, *given, **more), status="feasible", bound=0.0)

    monkeypatch.setattr(pruning, "run", run_without_proof)
    Pruner("highs", 1e-9).free(problem, 60.0)
    assert times == expected


@pytest.mark.parametrize(("seconds", "expected"), [(10.0, [6, 5, 40]), (30.0, [6, 30, 0])])
def test_a_program_whose_successor_would_take_too_long_is_the_last(
    seconds: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is made from the seconds that its relaxation took."""
    problem, times, gone = problem_of("gpt2-4", 2, 2, 2), [], [0.0]
    monkeypatch.setattr(pruning, "_MAX_FLOWS_ALL_CHOICES", 0)
    monkeypatch.setattr(pruning, "_MAX_FLOWS_RESTRICTED", (1_500, 1_600, 1_700))
    monkeypatch.setattr(pruning, "_MAX_FLOWS_PROOF", 0)
    monkeypatch.setattr(pruning, "cpu_seconds", lambda: gone[0])
    monkeypatch.setattr(pruning, "weigh", lambda *given: None)
    root = Program.root

    def slow_root(program: Program, *given: Any, **more: Any) -> Outcome:
        gone[0] += 0.0 if more else seconds
        return root(program, *given, **more)

    def run_without_proof(model: Model, solver: str, time_limit: float, *given: Any, **more: Any) -> Outcome:
        times.append(time_limit)
        return replace(run(model, solver, 60.0, *given, **more), status="feasible", bound=0.0)

    monkeypatch.setattr(Program, "root", slow_root)
    monkeypatch.setattr(pruning, "run", run_without_proof)
    Pruner("highs", 1e-9).free(problem, 60.0)
    assert times == expected


def test_the_choices_of_a_plan_up_to_a_limit_are_there() -> None:
    problem = problem_of("gpt2-4", 2, 2)
    choices, network = ProblemChoices(problem), Network(problem)
    network.climb()
    draw = random.Random(0)
    required = [np.array([draw.random() < 0.1 for _ in op.choices]) for op in problem.ops]
    everything = choices.count_flows(choices.all)
    before = 0
    for most in (everything // 8, everything // 3, everything):
        kept, limit = choices.up_to(network.least, required, most, np.inf)
        assert before <= choices.count_flows(kept) <= most
        before = choices.count_flows(kept)
        for some, least, mine in zip(kept, network.least, required, strict=True):
            assert (some == (least <= limit) | mine).all()
        assert [len(op.choices) for op in restricted_to(problem, kept).ops] == [int(some.sum()) for some in kept]
    assert limit == np.inf


BUDGETS = [
    *((0.3, 1 << 60), (0.7, 0)),
    *(pytest.param(*case, marks=slow) for case in [(-0.1, 0), (-0.1, 1 << 60), (0.3, 0), (0.7, 1 << 60)]),
]


@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((2, 2, 2), marks=slow)], ids=str)
@pytest.mark.parametrize(("part", "most"), BUDGETS, ids=str)
def test_few_ways_under_a_budget(
    mesh: tuple[int, ...], part: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program of all ways as a proof, and without one."""
    asked, least, largest = four(*mesh)
    budget, gap = least + part * (largest - least), 1e-3
    problem = asked.problem()
    model = Model(problem)
    Rows(model, budget)
    whole = run(model, "highs", 120.0, gap)
    monkeypatch.setattr(under_budget, "MAX_FLOWS_ALL_CHOICES", 0)
    choices = ProblemChoices(problem)
    some = choices.count_flows(choices.all) // 4
    monkeypatch.setattr(under_budget, "_MAX_FLOWS_RESTRICTED", (some // 2, some))
    monkeypatch.setattr(under_budget, "_MAX_FLOWS_BETTER_PLANS", most)
    model, found, is_all = fastest_within(Pruner("highs", gap), problem, budget, 120.0)
    assert is_all == (most > 0) or (is_all < (most > 0) and found.status == "optimal")  # few ways suffice
    if part < 0:
        assert whole.status == found.status == "infeasible"
        return
    assert found.bound <= whole.objective * (1 + 1e-7)
    assert found.objective >= whole.bound * (1 - 1e-7)
    assert found.objective <= whole.objective * (1 + (2 * gap if most else 0.1))
    told = asked.predict(read_solution(model, found))
    assert told.peak_bytes <= budget * (1 + 1e-6)
    assert told.step_seconds == pytest.approx(found.objective, rel=1e-9)


@pytest.mark.parametrize("most", [pytest.param(0, marks=pytest.mark.slow), 1 << 60])
def test_where_few_ways_have_no_plan_one_of_little_memory_is_the_first(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a later program of all ways, and without one."""
    asked, *_ = four(2, 2)
    problem = asked.problem()
    budget = 1.001 * least_memory(problem, 1e-3).budget_bytes
    sizes = {"MAX_FLOWS_ALL_CHOICES": 0, "_MAX_FLOWS_BETTER_PLANS": most, "_MAX_FLOWS_RESTRICTED": (1, 1)}
    for name, value in sizes.items():
        monkeypatch.setattr(under_budget, name, value)
    plans = Pruner("highs", 1e-3)
    small = LeastMemory(problem, plans)
    _, none, is_all = fastest_within(plans, problem, 0.9 * budget, 120.0, small=small)
    assert none.status == "infeasible" and is_all
    model, found, is_all = fastest_within(plans, problem, budget, 120.0, small=small)
    assert is_all == (most > 0)
    assert asked.predict(read_solution(model, found)).peak_bytes <= budget * (1 + 1e-6)


def test_a_plan_is_kept_where_memory_is_too_little_for_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, least, largest = four(2, 2)
    problem, seen = asked.problem(), list[Outcome]()

    def run_once(*args: Any, **options: Any) -> Outcome:
        if seen:
            raise MemoryError
        seen.append(run(*args, **options))
        return seen[0]

    monkeypatch.setattr(under_budget, "MAX_FLOWS_ALL_CHOICES", 0)
    monkeypatch.setattr(under_budget, "run", run_once)
    _, found, is_all = fastest_within(Pruner("highs", 1e-6), problem, (least + largest) / 2, 120.0)
    assert found.objective == seen[0].objective and found.status == "feasible" and not is_all


@slow
def test_near_a_plan_of_few_choices_is_one_of_all() -> None:
    asked, _, peak = four(2, 2)
    problem = asked.problem()
    found = least_memory(problem, 1e-3)
    fast_plans = Pruner("highs", 1e-3)
    near = fastest_near(fast_plans, problem, peak, (found.model, found.outcome), 3.0)
    assert near is not None
    model, outcome = near
    assert asked.predict(read_solution(model, outcome)).peak_bytes <= peak
    first = fastest_near(fast_plans, problem, peak, (found.model, found.outcome), 0.0)
    assert first is not None and outcome.objective <= first[1].objective
    assert fastest_near(fast_plans, problem, 0.9 * found.budget_bytes, (found.model, found.outcome), 0.0) is None
