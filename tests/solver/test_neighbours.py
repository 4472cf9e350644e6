"""Rows of equal blocks that keep what their neighbours keep too, beside the prediction: never less, and once.

What `test_exhaustive.py` asks of plans that a budget decides about is asked here of plans whatever their time.
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
    """What `relu` gives is kept by it and by the next block's product."""
    return relu(linear(x, weight)), y


def residual(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the blocks read is kept by their products alone, but for the first one's, which an op before keeps."""
    return x + linear(x, weight), y


def crossed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first block reads one tensor in two places, the others two."""
    return x + linear(y, weight) * 2.0, y + linear(x, weight) * 3.0


def cut(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first block reads is a storage, what others read half of one."""
    return torch.cat([x * 3.0, linear(x, weight)], 1)[:, WIDTH:], y


def late(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two ops keep what the block reads; there are levels of recompute between them."""
    return relu(gelu(linear(x, weight)) * x), y


def passed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One storage is handed on as views, and every block keeps it."""
    y = y.view(-1, WIDTH, WIDTH).view(ROWS, WIDTH)
    return relu(linear(x, weight)) * y, y


def common(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All blocks read one tensor besides."""
    return relu(linear(x * y, weight)), y


class Chain(nn.Module):
    """Equal blocks behind an op that keeps its result, or one that does not."""

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
    """Whatever recomputes, the rows say less than one copy more, but for what recomputed blocks read; `beside`: so many
    tensors that only the first block's ops convert, which count in the others too."""
    asked, problem, plans = some_plans(step, blocks, gelu)
    whole, fixed = ROWS * WIDTH * 4, Fixed(problem)
    for plan in plans:
        most = plan.predicted.peak_bytes + read_bytes(asked, problem, plan) + beside * whole
        counted = fixed.rows_bytes(plan)
        assert counted < most + whole // 2, f"rows say {counted:.0f}: {plan}"


FEW = 8  # rows of activations: what moves of the weights decides


@pytest.mark.parametrize("step", [plain, slow(late)])
def test_rows_count_what_divided_buckets_leave_behind(step: Step) -> None:
    """Of blocks that share a bucket, each recomputed one has its own, and the next one's is there in its turn."""
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


GRAPHS, QUICK = 200, (0, 161)  # in 161, what the first block reads lies otherwise than what the others do


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i in QUICK else pytest.mark.slow) for i in range(GRAPHS)])
@pytest.mark.parametrize("module", [Levelled, Handed])
def test_rows_of_plans_drawn_at_random(module: type[Levelled], seed: int) -> None:
    """They say the prediction, or more by no more than what recomputed blocks read."""
    asked = drawn(seed, PLANS // 2, module, fold=True)
    problem = asked.problem()
    plans, fixed = list(every_plan(asked, problem, recompute=True)), Fixed(problem)
    for plan in random.Random(seed).sample(plans, min(TRIED // 2, len(plans))):
        counted, peak = fixed.rows_bytes(plan), plan.predicted.peak_bytes
        assert counted >= peak * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"
        assert counted <= (peak + read_bytes(asked, problem, plan)) * (1 + 1e-6), f"rows say {counted:.0f}: {plan}"


HELD = 32, 49  # in these, what the caller holds decides


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i in HELD else pytest.mark.slow) for i in range(50)])
def test_rows_of_plans_whose_blocks_return_what_they_keep(seed: int) -> None:
    """They say no less than the prediction: where blocks recompute, the caller's tensors are there beside theirs."""
    asked = drawn(seed, PLANS // 2, Returning, fold=True)
    problem = asked.problem()
    plans, fixed = list(every_plan(asked, problem, recompute=True)), Fixed(problem)
    for plan in random.Random(seed).sample(plans, min(TRIED // 2, len(plans))):
        counted = fixed.rows_bytes(plan)
        assert counted >= plan.predicted.peak_bytes * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"


IDLE = 0, 7


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[] if i in IDLE else pytest.mark.slow) for i in range(24)])
def test_rows_of_plans_whose_results_no_backward_comes_to(seed: int) -> None:
    """They say no less than the prediction, whatever recomputes."""
    asked = drawn(seed, PLANS // 2, Beside, fold=True)
    problem = asked.problem()
    assert asked.memory.savings.holding
    plans, fixed = list(every_plan(asked, problem, recompute=True)), Fixed(problem)
    for plan in random.Random(seed).sample(plans, min(TRIED // 2, len(plans))):
        counted = fixed.rows_bytes(plan)
        assert counted >= plan.predicted.peak_bytes * (1 - 1e-6), f"rows say {counted:.0f}: {plan}"
