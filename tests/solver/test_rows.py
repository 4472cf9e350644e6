"""The program's memory rows against the prediction, for random plans.

The program is solved for the least peak that its rows allow for a fixed plan. That must be at least the predicted peak
and not much more: this finds a moment, or a term of one, that no row covers, without a budget that binds there.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_graphs import Fixed, every_count, recomputable
from small_models import MODELS, ready, toy_of
from thinned import thinned
from torch import nn
from toys import Stack, Toy, cluster, on_meta, toy

from autopar.solver.linear.terms import Linear
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.seconds.objective import run
from autopar.solver.solution import read_solution

PLANS, COUNTS = 3, 3  # per case: random choices for all ops, and for each of these random counts of recomputed blocks
MOST = 1.06  # the rows may be at most this multiple of the predicted peak


class Waves(nn.Module):
    """A model without parameters, whose activations can be split on any dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(4):
            x = torch.tanh(x)
        return x.square().mean()


def drawn_choices(problem: Problem, seed: int) -> list[int]:
    """The cheapest choices at random prices, among those whose layouts can be converted into each other."""
    draw, model = np.random.default_rng(seed), Model(problem)
    prices = {variable: float(draw.random()) for variables in model.x for variable in variables}
    model.seconds, model.overlap = Linear(prices), None
    values = run(model, "highs", 60.0, 0.3).values
    return [max(range(len(its)), key=lambda i: values[its[i]]) for its in model.x]


def check(asked: Toy, seed: int, *, fold: bool, most: float = MOST) -> None:
    """Check the rows of random plans; unfolded problems have blocks of two kinds."""
    draw, folded = random.Random(seed), asked.problem()
    problem = folded if fold else asked.problem(fold=False)
    fixed = Fixed(problem)
    for number in range(PLANS):
        kinds = [drawn_choices(folded, 2 * (100 * seed + number) + i) for i in range(1 if fold else 2)]
        kind = [draw.randrange(len(kinds)) for _ in problem.stages]
        choices = [kinds[kind[op.stage]][folded.op_of[op.node]] for op in problem.ops]
        for _ in range(COUNTS):
            counts = [draw.choice(every_count(problem.stages[i])) for i in recomputable(problem)]
            outcome = fixed.least(choices, counts)
            assert outcome.status == "optimal"
            peak = asked.predict(read_solution(fixed.model, outcome)).peak_bytes
            counted = outcome.objective * UNIT
            assert peak <= counted * (1 + 1e-6), f"{counts}: {peak} bytes, rows say {counted:.0f}"
            assert counted <= peak * most, f"{counts}: {peak} bytes, rows say {counted:.0f}"


@pytest.mark.parametrize(("mesh", "micro_batches", "fold"), thinned(2, [(2,), (2, 2)], [1, 2], [True, False]), ids=str)
def test_rows_of_a_stack(mesh: tuple[int, ...], micro_batches: int, fold: bool) -> None:
    x = torch.empty(64, 16, device="meta")
    for seed in range(2):
        on = cluster(*mesh, seed=seed, kind="cuda")
        check(toy(on_meta(Stack, 5), x, on=on, micro_batches=micro_batches), seed, fold=fold)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_rows_of_what_conversions_stage(mesh: tuple[int, ...]) -> None:
    """Conversions along other dims than the first need staging copies; activations are large beside weights."""
    asked = toy(on_meta(Waves), torch.empty(4, 64, 16, device="meta"), on=cluster(*mesh, seed=5))
    for seed in range(3):
        check(asked, seed, fold=True)


def test_equal_blocks_count_as_much_as_blocks_told_apart() -> None:
    """Also at recompute levels that no block uses, and where one block's gradients go as the next one's come."""
    asked, draw = toy_of(ready("gpt2-4", 4)), random.Random(0)
    folded, single = asked.problem(), asked.problem(fold=False)
    one, other = Fixed(folded), Fixed(single)
    [stage] = [folded.stages[i] for i in recomputable(folded)]
    for seed in range(2):
        choices = drawn_choices(folded, seed)
        each = [choices[folded.op_of[op.node]] for op in single.ops]
        for _ in range(4):
            high = draw.randint(1, stage.count - 1)
            levels = [high] * (stage.depth - 1) + [draw.randint(0, high)]
            of_each = [[int(single.stages[i].first < many) for many in levels] for i in recomputable(single)]
            together, apart = one.least(choices, [levels]).objective, other.least(each, of_each).objective
            assert together == pytest.approx(apart, rel=1e-3), levels


@pytest.mark.parametrize(("mesh", "bucket_bytes"), thinned(2, [(2,), (2, 2)], [20 << 10, 6 << 10, 1 << 10]), ids=str)
def test_rows_of_small_buckets(mesh: tuple[int, ...], bucket_bytes: int) -> None:
    """A few blocks share a bucket, or a block has several, or each weight has its own."""
    asked = toy(on_meta(Stack, 5), torch.empty(64, 16, device="meta"), on=cluster(*mesh, seed=3))
    check(replace(asked, memory=replace(asked.memory, bucket_bytes=bucket_bytes)), 3, fold=True)


def sharded(problem: Problem, *, regather: bool) -> list[int]:
    """The choices that split the batch and store parameters as shards, where such choices exist."""
    model, prices = Model(problem), dict[int, float]()
    for op, variables in zip(problem.ops, model.x, strict=True):
        for choice, variable in zip(op.choices, variables, strict=True):
            placed = [p for layout in choice.strategy.outputs[:1] for p in layout.placements]
            prices[variable] = float(not placed or any(not p.is_sharded or p.dim for p in placed))
            prices[variable] += 0.5 * (choice.regather != regather)
    model.seconds, model.overlap = Linear(prices), None
    values = run(model, "highs", 60.0, 0.01).values
    return [max(range(len(its)), key=lambda i: values[its[i]]) for its in model.x]


@pytest.mark.parametrize("regather", [False, True])
def test_recomputed_blocks_share_no_bucket(regather: bool) -> None:
    asked = toy(on_meta(Stack, 3), torch.empty(4, 16, device="meta"), on=cluster(2))
    problem = asked.problem()
    fixed, choices, [stage] = Fixed(problem), sharded(problem, regather=regather), recomputable(problem)
    assert problem.grouping.shares(problem.grouping.regions // 2)
    for counts in every_count(problem.stages[stage]):
        outcome = fixed.least(choices, [counts])
        peak = asked.predict(read_solution(fixed.model, outcome)).peak_bytes
        counted = outcome.objective * UNIT
        assert peak <= counted * (1 + 1e-6), f"{counts}: {peak} bytes, rows say {counted:.0f}"
        if counts[-1] in (0, counts[0]) and counts[0] in (0, problem.stages[stage].count):
            assert counted <= peak * MOST, f"{counts}: {peak} bytes, rows say {counted:.0f}"


def cases(quick: int) -> list[object]:
    return [pytest.param(name, marks=[] if i < quick else pytest.mark.slow) for i, name in enumerate(names())]


def names() -> list[str]:
    return ["gpt2-8-wide", *(name for name in MODELS if name != "gpt2-8-wide")]


@pytest.mark.parametrize("name", cases(1))
@pytest.mark.parametrize(
    ("mesh", "micro_batches"), [((4,), 1), pytest.param((2, 2), 2, marks=pytest.mark.slow)], ids=str
)
def test_rows_of_a_model(name: str, mesh: tuple[int, ...], micro_batches: int) -> None:
    asked = toy_of(ready(name, *mesh, micro_batches=micro_batches))
    for fold in (True, False):
        check(asked, 1, fold=fold)
