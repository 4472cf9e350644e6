"""Prices computed for all pairs of layouts at once equal those computed for each pair."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_branches import Normed
from toys import cluster, on_meta, toy

from autopar.cost.memory.transfer_path import transfer_path
from autopar.graph import TensorRef, tensor_of
from autopar.layout import R_PLUS, Layout, P, R, shard
from autopar.resharding.all_paths import all_paths
from autopar.resharding.reshard import steps
from autopar.resharding.staging import makes_another, staged_elements
from autopar.solver.model import Model
from autopar.solver.seconds.staged import staged_of_paths


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
        paths = model.costs.table(ref).transfer_paths(stored, legal)
        for (i, storage), (j, wanted) in itertools.product(enumerate(stored), enumerate(legal)):
            if possible[i, j]:
                assert paths[i][j] == transfer_path(problem.memory, ref, storage, wanted)
                way = paths[i][j]
                kinds.add(
                    (way.further > 0, way.last > 0, way.reduces, way.result > 0, way.scatters, way.scatters_later)
                )
    assert len(kinds) >= (3 if len(mesh) == 1 else 5)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    ("mesh", "shape"), [((2,), (4, 8, 6)), ((2, 2), (4, 8, 6)), ((2, 2), (3, 5, 7)), ((1, 2), (1, 8, 6))], ids=str
)
def test_what_conversions_stage(
    mesh: tuple[int, ...], shape: tuple[int, ...], needs_grad: bool, order: tuple[int, ...]
) -> None:
    some = [R, P, shard(0), shard(1), shard(2), shard(1, 2), *([R_PLUS] if needs_grad else [])]
    layouts = [
        one for one in map(Layout, itertools.product(some, repeat=len(mesh))) if one.is_legal(shape, mesh, ragged=True)
    ]
    paths = all_paths(layouts, layouts, shape, mesh, needs_grad=needs_grad)
    (forward, another), (backward, another_back) = staged_of_paths(paths, shape, mesh, order)
    for (i, source), (j, wanted) in itertools.product(enumerate(layouts), repeat=2):
        if paths.possible[i, j]:
            path = steps(source, wanted, shape, mesh, needs_grad=needs_grad)
            assert (forward[i, j], backward[i, j]) == staged_elements(path, shape, mesh, order), (source, wanted)
            assert (another[i, j], another_back[i, j]) == makes_another(path, shape, mesh), (source, wanted)
    assert forward.any()
