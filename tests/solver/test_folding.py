"""Repeated blocks are found by structure, and deciding once for all of them loses little or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import Block, Stack, cluster, on_meta, toy

from autopar.cost.structure.blocks import regions


class Renamed(nn.Module):
    """Equal blocks under different module names, with a different block between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.odd = Block(16, 64), Block(16, 64), Block(16, 32)
        self.third, self.fourth = Block(16, 64), Block(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.first, self.second, self.odd, self.third, self.fourth):
            x = block(x)
        return x.sum()


def test_blocks_are_found_by_structure() -> None:
    x = torch.empty(64, 16, device="meta")
    stack = toy(on_meta(Stack, 5), x, on=cluster(2))
    assert [r.count for r in stack.repeats] == [5]
    renamed = toy(on_meta(Renamed), x, on=cluster(2))
    assert [r.count for r in renamed.repeats] == [2, 2]
    nodes = list(renamed.graph.nodes)
    for repeat in renamed.repeats:
        targets = [[nodes[p].op for p in repeat.instance(i)] for i in range(repeat.count)]
        assert targets[0] == targets[1]
    rows = regions(len(nodes), renamed.repeats)
    assert [p for r in rows for p in range(r.first, r.last + 1)] == list(range(len(nodes)))


class Alternating(nn.Module):
    """Every other block repeats an op twice more, so that no label recurs at a distance of exactly one period."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, 64) for _ in range(2 * pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x if i % 2 else x.abs().abs())
        return x.sum()


def test_blocks_of_two_layers_are_found() -> None:
    found = toy(on_meta(Alternating, 4), torch.empty(64, 16, device="meta"), on=cluster(2)).repeats
    assert [(r.period, r.count) for r in found] == [(20, 3), (9, 2)], "pairs, and the two layers that are left"


def test_decisions_do_not_grow_with_the_number_of_blocks() -> None:
    x = torch.empty(64, 16, device="meta")
    sizes = {len(toy(on_meta(Stack, n), x, on=cluster(2)).problem().ops) for n in (3, 4, 8)}
    assert len(sizes) == 1


class Dense(nn.Module):
    """Equal layers; the first one reads the model's input or, with `before`, an op's result."""

    def __init__(self, layers: int, *, before: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(layers))
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.abs() if self.before else x
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


@pytest.mark.parametrize(("layers", "counts"), [(2, [1, 1]), (5, [1, 4])])
@pytest.mark.parametrize(("before", "gradient"), [(True, False), (False, True), (True, True)])
def test_a_block_that_reads_other_than_the_next_decides_for_itself(
    layers: int, counts: list[int], before: bool, gradient: bool
) -> None:
    """An input without gradient makes a block's backward cheaper, and to save the step's own input takes no memory, so
    the first block is not equal to the others."""
    with torch.device("meta"):
        problem = toy(Dense(layers, before=before), torch.empty(64, 16, requires_grad=gradient), on=cluster(2, seed=1))
    blocks = [stage for stage in problem.problem().stages if stage.repeat is not None]
    alike = before and gradient
    assert [stage.count for stage in blocks] == ([layers] if alike else counts)
    assert [stage.first for stage in blocks] == ([0] if alike else [0, 1])
    for solution in (problem.solve(), problem.solve(0.98 * problem.predict(problem.solve()).peak_bytes)):
        assert solution.seconds == pytest.approx(problem.predict(solution).step_seconds, rel=1e-9)


def test_blocks_that_decide_for_themselves_have_levels_of_recompute() -> None:
    problem = toy(on_meta(Stack, 3), torch.empty(512, 16, device="meta"), on=cluster(2))
    [folded] = [stage for stage in problem.problem().stages if stage.repeat is not None]
    single = [stage for stage in problem.problem(fold=False).stages if stage.repeat is not None]
    assert folded.depth > 1
    assert [stage.levels for stage in single] == 3 * [folded.levels]


@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_folding_costs_little_under_a_budget_and_nothing_without(mesh: tuple[int, ...]) -> None:
    problem = toy(on_meta(Stack, 3), torch.empty(512, 16, device="meta"), on=cluster(*mesh, seed=3), keep=3)
    assert [stage.count for stage in problem.problem().stages] == [1, 3, 1], "the blocks are folded"
    folded, unfolded = problem.solve(), problem.solve(fold=False)
    assert folded.seconds == pytest.approx(unfolded.seconds, rel=1e-6)
    least, most = problem.smallest_budget(), problem.predict(folded).peak_bytes
    assert least <= 1.02 * problem.smallest_budget(fold=False)
    for part in (0.7, 0.3, 0.02):
        budget = least + part * (most - least)
        one, all_ = problem.solve(budget, gap=1e-4), problem.solve(budget, fold=False, gap=1e-4)
        assert all_.seconds <= one.seconds * (1 + 2e-4)
        assert one.seconds <= all_.seconds * 1.05
