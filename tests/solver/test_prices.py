"""What is told of all pairs of layouts at once is what is told of each."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_branches import Normed
from toys import cluster, on_meta, toy

from autopar.cost.moving import way_between
from autopar.graph import TensorRef, tensor_of
from autopar.layout import R_PLUS, Layout, R, shard
from autopar.solver.model import Model


@pytest.mark.parametrize("mesh", [(4,), (2, 4), (1, 4, 2)], ids=str)
def test_ways_of_parameters(mesh: tuple[int, ...]) -> None:
    problem = toy(on_meta(Normed, 2), torch.empty(512, 16, device="meta"), on=cluster(*mesh, seed=1)).problem()
    model, kinds = Model(problem), set()
    layouts = [Layout(some) for some in itertools.product([R, R_PLUS, shard(0), shard(1)], repeat=len(mesh))]
    for ref in (TensorRef(op.node, 0) for op in problem.ops if problem.memory.is_parameter(op.node)):
        shape = tuple(tensor_of(ref).shape)
        legal = [one for one in layouts if one.is_legal(shape, mesh, ragged=True)]
        stored = [one for one in legal if R_PLUS not in one.placements]
        possible = model.costs.table(ref).prices(stored, legal).possible
        ways = model.costs.table(ref).ways(stored, legal)
        for (i, storage), (j, wanted) in itertools.product(enumerate(stored), enumerate(legal)):
            if possible[i, j]:
                assert ways[i][j] == way_between(problem.memory, ref, storage, wanted)
                way = ways[i][j]
                kinds.add(
                    (way.further > 0, way.last > 0, way.reduces, way.result > 0, way.scatters, way.scatters_later)
                )
    assert len(kinds) >= (3 if len(mesh) == 1 else 5)
