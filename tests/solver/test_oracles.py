"""The program against exhaustive search, and its objective and peak against the prediction for the plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from random_graphs import every_plan
from thinned import thinned
from toys import Beside, Random, Stack, Toy, cluster, on_meta, toy

from autopar.plans import Prediction
from autopar.solver.model import Model
from autopar.solver.seconds.objective import run

MESHES = [(2,), (2, 2)]


def _every_prediction(asked: Toy, *, recompute: bool = False) -> list[Prediction]:
    """The prediction of every plan; blocks are recomputed as a whole or not at all."""
    problem = asked.problem(fold=False, recompute=recompute, inner_levels=0)
    return [plan.predicted for plan in every_plan(asked, problem, recompute=recompute)]


def _random(seed: int, mesh: tuple[int, ...], micro_batches: int = 1) -> Toy:
    on = cluster(*mesh, seed=seed)
    x = torch.empty(4, 8, device="meta")
    return toy(on_meta(Random, seed), x, on=on, keep=3, seed=seed, micro_batches=micro_batches)


@pytest.mark.parametrize(("seed", "mesh"), thinned(2, range(4), MESHES), ids=str)
def test_optimum_is_that_of_exhaustive_search(seed: int, mesh: tuple[int, ...]) -> None:
    problem = _random(seed, mesh)
    plans = _every_prediction(problem)
    best = min(p.step_seconds for p in plans)
    assert problem.solve().seconds == pytest.approx(best, rel=1e-6)

    peaks = sorted(p.peak_bytes for p in plans)
    for budget in (peaks[len(peaks) // 20], peaks[len(peaks) // 3]):
        fits = min(p.step_seconds for p in plans if p.peak_bytes <= budget)
        solution = problem.solve(budget * (1 + 1e-9))
        assert problem.predict(solution).peak_bytes <= budget
        assert solution.seconds == pytest.approx(fits, rel=1e-6)


@pytest.mark.parametrize(
    ("seed", "mesh"),
    [
        *thinned(2, range(3), MESHES),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(range(3, 6), MESHES)),
    ],
    ids=str,
)
def test_what_is_returned_beside_a_loss_pays_no_backward(seed: int, mesh: tuple[int, ...]) -> None:
    """The output alone reads one of the results; the loss reads the other too."""
    x = torch.empty(4, 8, device="meta")
    problem = toy(on_meta(Beside), x, on=cluster(*mesh, seed=seed), keep=4 if len(mesh) == 1 else 3, seed=seed)
    best = min(p.step_seconds for p in _every_prediction(problem))
    solution = problem.solve()
    assert solution.seconds == pytest.approx(problem.predict(solution).step_seconds, rel=1e-9)
    assert solution.seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("seed", "micro_batches"), thinned(2, [1, 3, 4, 7], [1, 2]))
def test_optimum_where_communication_hides(seed: int, micro_batches: int) -> None:
    """Buckets of a few elements, so that reductions begin before backward ends; graphs with two weights."""
    problem = _random(seed, (2,), micro_batches)
    problem.memory = replace(problem.memory, bucket_bytes=64)
    problem.cluster = replace(problem.cluster, device=replace(problem.cluster.device, overlap=0.7))
    plans = _every_prediction(problem)
    assert any(p.hidden_seconds for p in plans)
    for p in plans:
        assert 0 <= p.hidden_seconds <= 0.7 * p.comm_seconds * (1 + 1e-9) and p.hidden_seconds <= p.compute_seconds
    model = Model(problem.problem())
    outcome = run(model, "highs", 60.0, 1e-9)
    assert outcome.objective == pytest.approx(min(p.step_seconds for p in plans), rel=1e-6)
    overlap = model.overlap
    assert overlap is not None
    saved = overlap.unit * outcome.values[overlap.hidden]
    assert saved == pytest.approx(overlap.seconds(outcome.values), abs=1e-6 * outcome.objective)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_objective_is_the_predicted_step(mesh: tuple[int, ...], micro_batches: int) -> None:
    for seed in range(4):
        problem = _random(seed, mesh, micro_batches)
        solution = problem.solve()
        assert solution.seconds == pytest.approx(problem.predict(solution).step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("fold", "mesh"), [(True, (2,)), (True, (2, 2)), pytest.param(False, (2,), marks=pytest.mark.slow)], ids=str
)
def test_objective_and_budget_hold_with_recompute(fold: bool, mesh: tuple[int, ...]) -> None:
    problem = toy(on_meta(Stack, 4), torch.empty(512, 16, device="meta"), on=cluster(*mesh, seed=1), keep=4)
    least, most = problem.smallest_budget(fold=fold), problem.predict(problem.solve(fold=fold)).peak_bytes
    recomputed, seconds = [], []
    for part in (0.9, 0.5, 0.2, 0.01):
        budget = least + part * (most - least)
        solution = problem.solve(budget, fold=fold, gap=1e-4)
        predicted = problem.predict(solution)
        assert predicted.peak_bytes <= budget * (1 + 1e-9)
        assert solution.seconds == pytest.approx(predicted.step_seconds, rel=1e-9)
        recomputed.append(len(solution.segments))
        seconds.append(solution.seconds)
    assert max(recomputed) > 0
    for larger, smaller in itertools.pairwise(seconds):
        assert larger <= smaller * (1 + 2e-4), "a smaller budget was faster"


def test_recompute_of_a_chain_is_that_of_exhaustive_search() -> None:
    """One device, four blocks: which of them to recompute, against all sixteen combinations."""
    problem = toy(on_meta(Stack, 4), torch.empty(512, 16, device="meta"), on=cluster(1, seed=2), keep=1)
    weights = [node for node in problem.graph.nodes if problem.memory.is_parameter(node)]
    problem.restricted = replace(problem.restricted, regather=dict.fromkeys(weights, False))
    plans = _every_prediction(problem, recompute=True)
    assert len(plans) == 2**4, "each block kept or recomputed"
    inputs = 512 * 16 * 4  # bytes of a recomputed block's input, which the rows count beside the copy in its replay
    for budget in sorted({p.peak_bytes for p in plans}):
        best = min(p.step_seconds for p in plans if p.peak_bytes <= budget)
        for fold in (True, False):
            solution = problem.solve(budget + 2 * inputs, fold=fold)
            assert solution.seconds <= best * (1 + 1e-6)
