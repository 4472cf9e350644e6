"""Memory rows of equal blocks that save tensors which their neighbours save too, against the prediction.

Rows must never be below the prediction, and must count a shared tensor once. `test_exhaustive.py` checks this for
plans that a budget decides about, these tests for plans of any step time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
import torch
from random_graphs import WIDTH, Beside, Fixed, Handed, Levelled, Returning, Tried, drawn, every_plan, read_bytes
from thinned import thinned
from torch import nn
from torch.nn.functional import gelu, linear, relu, softmax
from toys import Toy, cluster, on_meta, toy

from autopar.solver.problem import Problem

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
ROWS, PLANS, TRIED = 64, 400, 10


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


def plain(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`relu` saves its result, and the next block's product saves the same tensor."""
    return relu(linear(x, weight)), y


def residual(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the block's own product saves its input; the op before the first block saves that block's input too."""
    return x + linear(x, weight), y


def crossed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first block's two inputs are one tensor, those of the other blocks are two."""
    return x + linear(y, weight) * 2.0, y + linear(x, weight) * 3.0


def cut(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first block reads a whole storage, the others a view of half of one."""
    return torch.cat([x * 3.0, linear(x, weight)], 1)[:, WIDTH:], y


def late(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two ops save the block's input, with levels of recompute between them."""
    return relu(gelu(linear(x, weight)) * x), y


def passed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One storage is passed on as views, and every block saves it."""
    y = y.view(-1, WIDTH, WIDTH).view(ROWS, WIDTH)
    return relu(linear(x, weight)) * y, y


def common(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All blocks also read one common tensor."""
    return relu(linear(x * y, weight)), y


class Chain(nn.Module):
    """Equal blocks after an op that saves its result or one that does not."""

    def __init__(self, step: Step, blocks: int, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.step, self.before = step, before
        self.first = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.weights = nn.ParameterList(torch.empty(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = self.before(linear(x, self.first))
        for weight in self.weights:
            x, y = self.step(x, y, weight)
        return (x * y).square().mean() if self.step is crossed else x.square().mean()


def distribution(x: torch.Tensor) -> torch.Tensor:
    return softmax(x, -1)


def some_plans(
    step: Step, blocks: int, before: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Toy, Problem, list[Tried]]:
    x = torch.empty(ROWS, WIDTH, device="meta")
    asked = toy(on_meta(Chain, step, blocks, before), x, on=cluster(2, seed=1), keep=2)
    problem = asked.problem()
    assert max(stage.count for stage in problem.stages) == blocks
    plans = list(islice(every_plan(asked, problem, recompute=True), PLANS))
    return asked, problem, random.Random(blocks).sample(plans, min(TRIED, len(plans)))


@pytest.mark.parametrize(
    ("step", "before"), thinned(2, [plain, residual, crossed, cut, late, passed, common], [distribution, gelu])
)
def test_rows_are_never_less(step: Step, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _, problem, plans = some_plans(step, 3, before)
    fixed = Fixed(problem)
    for plan in plans:
        counted = fixed.rows_bytes(plan)
        assert counted >= plan.predicted.peak_bytes * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"


@pytest.mark.parametrize("step", [plain, slow(residual), slow(crossed), cut])
def test_budgets_hold_behind_an_op_that_keeps_its_result(step: Step) -> None:
    asked, *_ = some_plans(step, 5, distribution)
    smallest = asked.smallest_budget()
    for budget in (smallest * 1.001, smallest * 1.1, smallest * 1.3):
        assert asked.predict(asked.solve(budget)).peak_bytes <= budget


@pytest.mark.parametrize(
    ("step", "blocks", "beside"), [(plain, 2, 0), slow(plain, 3, 0), slow(plain, 5, 0), (late, 5, 1)]
)
def test_what_two_blocks_keep_counts_once(step: Step, blocks: int, beside: int) -> None:
    """With any recompute the rows exceed the prediction by less than one more copy, apart from what recomputed blocks
    read; `beside`: number of tensors that only the first block's ops convert, but that rows count for every block."""
    asked, problem, plans = some_plans(step, blocks, gelu)
    whole, fixed = ROWS * WIDTH * 4, Fixed(problem)
    for plan in plans:
        most = plan.predicted.peak_bytes + read_bytes(asked, problem, plan) + beside * whole
        counted = fixed.rows_bytes(plan)
        assert counted < most + whole // 2, f"rows say {counted:.0f}: {plan}"


FEW = 8  # rows of the activations: so few that buckets of weights determine the peak


@pytest.mark.parametrize("step", [plain, slow(late)])
def test_rows_count_what_divided_buckets_leave_behind(step: Step) -> None:
    """If blocks share a bucket, each recomputed one has its own, and the next one's exists at the same time."""
    x = torch.empty(FEW, WIDTH, device="meta")
    asked = toy(on_meta(Chain, step, 3, gelu), x, on=cluster(2, seed=1), keep=4)
    memory, some = asked.memory, dict(asked.restricted.strategies)
    for node, strategies in some.items():
        if memory.is_parameter(node):
            some[node] = tuple(one for one in strategies if "S" in str(one.outputs[0]))[:1]
        else:
            some[node] = tuple(
                one
                for one in strategies
                if not any(
                    memory.is_parameter(ref.node) and "S" in str(wanted)
                    for ref, wanted in zip(memory.inputs[node], one.inputs, strict=True)
                )
            )[:2]
    asked.restricted = replace(asked.restricted, strategies=some)
    problem = asked.problem()
    plans, fixed = list(islice(every_plan(asked, problem, recompute=True), 6 * PLANS)), Fixed(problem)
    for plan in random.Random(3).sample(plans, min(4 * TRIED, len(plans))):
        counted = fixed.rows_bytes(plan)
        assert counted >= plan.predicted.peak_bytes * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"


GRAPHS, QUICK = 200, (0, 161)  # in 161 the first block's input has another layout than those of the other blocks


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i in QUICK else pytest.mark.slow) for i in range(GRAPHS)])
@pytest.mark.parametrize("module", [Levelled, Handed])
def test_rows_of_plans_drawn_at_random(module: type[Levelled], seed: int) -> None:
    """The rows are at least the prediction, and exceed it by at most what recomputed blocks read."""
    asked = drawn(seed, PLANS // 2, module, fold=True)
    problem = asked.problem()
    plans, fixed = list(every_plan(asked, problem, recompute=True)), Fixed(problem)
    for plan in random.Random(seed).sample(plans, min(TRIED // 2, len(plans))):
        counted, peak = fixed.rows_bytes(plan), plan.predicted.peak_bytes
        assert counted >= peak * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"
        assert counted <= (peak + read_bytes(asked, problem, plan)) * (1 + 1e-6), f"rows say {counted:.0f}: {plan}"


HELD = 32, 49  # graphs in which tensors held by the caller determine the peak


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i in HELD else pytest.mark.slow) for i in range(50)])
def test_rows_of_plans_whose_blocks_return_what_they_keep(seed: int) -> None:
    """The rows are at least the prediction: the tensors that the caller holds exist beside the replayed ones."""
    asked = drawn(seed, PLANS // 2, Returning, fold=True)
    problem = asked.problem()
    plans, fixed = list(every_plan(asked, problem, recompute=True)), Fixed(problem)
    for plan in random.Random(seed).sample(plans, min(TRIED // 2, len(plans))):
        counted = fixed.rows_bytes(plan)
        assert counted >= plan.predicted.peak_bytes * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"


IDLE = 0, 7


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i in IDLE else pytest.mark.slow) for i in range(24)])
def test_rows_of_plans_whose_results_no_backward_comes_to(seed: int) -> None:
    """The rows are at least the prediction, with any recompute."""
    asked = drawn(seed, PLANS // 2, Beside, fold=True)
    problem = asked.problem()
    assert asked.memory.savings.holding
    plans, fixed = list(every_plan(asked, problem, recompute=True)), Fixed(problem)
    for plan in random.Random(seed).sample(plans, min(TRIED // 2, len(plans))):
        counted = fixed.rows_bytes(plan)
        assert counted >= plan.predicted.peak_bytes * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"
