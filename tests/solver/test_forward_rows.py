"""Memory rows against the prediction for random plans of passes without backward: the rows cover every moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_graphs import Fixed
from small_models import MODELS, ready, toy_of
from test_rows import drawn_choices
from thinned import thinned
from torch import nn
from toys import Stack, Toy, cluster, on_meta, toy

from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.solution import read_solution

PLANS, MOST = 4, 1.1  # random choices per case; the rows may be at most this multiple of the predicted peak
BUCKETS = [64 << 20, 20 << 10, 1 << 10]  # bytes: one bucket for all blocks, one for a few, several for one
GRID = thinned(2, [(2,), (2, 2)], [True, False], BUCKETS)  # meshes, folded or not, bucket sizes


class Shared(nn.Module):
    """All blocks read one weight, embedding and head are tied, and each block's input is returned too."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words, self.weight = nn.Embedding(64, 16), nn.Parameter(torch.empty(16, 16))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, seen = self.words(x), []
        for norm in self.norms:
            seen.append(x)
            x = torch.relu(nn.functional.linear(norm(x), self.weight))
        return (nn.functional.linear(x, self.words.weight), *seen)


def without_backward(asked: Toy, bucket_bytes: int) -> Toy:
    return replace(asked, memory=replace(asked.memory, train=False, repeats=asked.repeats, bucket_bytes=bucket_bytes))


def check(asked: Toy, seed: int, *, fold: bool) -> None:
    problem = asked.problem(fold=fold)
    fixed = Fixed(problem)
    for number in range(PLANS):
        outcome = fixed.least(drawn_choices(problem, 100 * seed + number), [])
        assert outcome.status == "optimal"
        peak, counted = asked.predict(read_solution(fixed.model, outcome)).peak_bytes, outcome.objective * UNIT
        assert peak <= counted * (1 + 1e-6), f"{peak} bytes, rows say {counted:.0f}"
        assert counted <= peak * MOST, f"{peak} bytes, rows say {counted:.0f}"


@pytest.mark.parametrize(("mesh", "fold", "bucket_bytes"), GRID, ids=str)
def test_rows_of_a_stack(mesh: tuple[int, ...], fold: bool, bucket_bytes: int) -> None:
    with torch.no_grad():
        asked = toy(on_meta(Stack, 6), torch.empty(64, 16, device="meta"), on=cluster(*mesh, seed=0))
    check(without_backward(asked, bucket_bytes), 0, fold=fold)


@pytest.mark.parametrize(("mesh", "fold", "bucket_bytes"), GRID, ids=str)
def test_rows_of_parameters_that_several_blocks_read(mesh: tuple[int, ...], fold: bool, bucket_bytes: int) -> None:
    with torch.no_grad():
        ids = torch.empty(64, dtype=torch.long, device="meta")
        asked = toy(on_meta(Shared, 4), ids, on=cluster(*mesh, seed=1))
    check(without_backward(asked, bucket_bytes), 1, fold=fold)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n != "gpt2-4" else []) for n in MODELS])
@pytest.mark.parametrize("mesh", [(4,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_rows_of_a_model(name: str, mesh: tuple[int, ...]) -> None:
    with torch.no_grad():
        asked = toy_of(ready(name, *mesh))
    for bucket_bytes in (64 << 20, 1 << 20):
        check(without_backward(asked, bucket_bytes), 2, fold=True)
