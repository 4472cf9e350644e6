"""Memory rows against the prediction for graphs whose input has another dtype than the one that ops read it in."""

from __future__ import annotations

import pytest
import test_forward_rows
import torch
from test_rows import check
from torch import nn
from toys import Toy, cluster, on_meta, toy

from autopar.graph import EXAMPLE


class Readers(nn.Module):
    """All blocks read the model's input, which is larger than any other tensor."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 8) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](x)
        for block in self.blocks[1:]:
            h = torch.relu(block(x) + h)
        return h.square().mean()


def cast(mesh: tuple[int, ...], dtype: torch.dtype) -> Toy:
    asked = toy(on_meta(Readers, 5), torch.empty(64, 32, device="meta"), on=cluster(*mesh, seed=3))
    for node in asked.memory.graph.nodes:
        if node.op == "placeholder":
            node.meta[EXAMPLE] = torch.empty(64, 32, dtype=dtype, device="meta")
    return asked


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_rows_of_steps(mesh: tuple[int, ...], fold: bool) -> None:
    check(cast(mesh, torch.float64), 4, fold=fold)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_rows_of_calls(mesh: tuple[int, ...]) -> None:
    with torch.no_grad():
        asked = cast(mesh, torch.float64)
    test_forward_rows.check(test_forward_rows.without_backward(asked, 64 << 20), 4, fold=True)


def test_no_more_than_the_part_of_a_rank_is_cast() -> None:
    """An input counts with the bytes of the dtype it is given in, in every layout: a rank only casts its shard."""
    plain, twice = (cast((4,), dtype) for dtype in (torch.float32, torch.float64))
    size = 64 * 32 * 4
    for one, expected in ((plain, size), (twice, 2 * size)):
        node = next(node for node in one.memory.graph.nodes if node.op == "placeholder")
        layouts = {choice.strategy.outputs[0] for choice in one.problem().ops[one.problem().op_of[node]].choices}
        assert {one.memory.input_bytes(node, layout) for layout in layouts} == {expected}
