"""Computing the steps for all pairs of layouts at once gives the same steps as for each pair."""

from __future__ import annotations

import itertools
import math

import pytest

from autopar.errors import LayoutError
from autopar.layout import R_PLUS, Layout, P, Placement, R, shard
from autopar.resharding.all_paths import KnownRoutes, Paths, all_paths
from autopar.resharding.path_edges import KINDS
from autopar.resharding.reshard import Move, Step, steps

VALUES = [R, P, shard(0), shard(1), shard(0, 2), Placement("partial", join="max")]

SLOW = pytest.mark.slow
LONG = [((16, 3), (2, 2, 2), True), ((8, 5), (1, 4, 2), True), ((8, 5), (1, 4, 2), False)]


def one(source: Layout, wanted: Layout, shape: tuple[int, ...], mesh: tuple[int, ...], grad: bool) -> list[Step] | None:
    try:
        return list(steps(source, wanted, shape, mesh, needs_grad=grad))
    except LayoutError:
        return None


def sent(paths: Paths, number: int) -> tuple[int, Move | None, Move | None]:
    axis = int(paths.axis[number])
    moves = [
        Move(KINDS[some.kind[number]], axis, int(some.elements[number])) if some.kind[number] >= 0 else None
        for some in (paths.forward, paths.backward)
    ]
    return axis, moves[0], moves[1]


@pytest.mark.parametrize(
    ("shape", "mesh", "grad"),
    [
        pytest.param(shape, mesh, grad, id=f"{shape}-{mesh}-{kind}", marks=SLOW if (shape, mesh, grad) in LONG else [])
        for shape, mesh in [
            ((8, 6), (4,)),
            ((8, 6), (2, 3)),
            ((16, 8), (2, 4)),
            ((16, 3), (2, 2, 2)),
            ((8, 5), (1, 4, 2)),
        ]
        for kind, grad in {"gradient": True, "value": False}.items()
    ],
)
def test_they_are_the_steps_of_each_pair(shape: tuple[int, ...], mesh: tuple[int, ...], grad: bool) -> None:
    sources, wanted = layouts_of(len(mesh), grad)
    check(all_paths(sources, wanted, shape, mesh, needs_grad=grad), sources, wanted, shape, mesh, grad)


@pytest.mark.parametrize("grad", [True, False], ids=["gradient", "value"])
@pytest.mark.parametrize(
    ("shape", "longer", "mesh"),
    [
        ((8, 6), (40, 18), (4,)),
        ((8, 6), (24, 42), (2, 3)),
        pytest.param((16, 3), (80, 6), (2, 2, 2), marks=SLOW),
        pytest.param((16, 3), (80, 3), (2, 2, 2), marks=SLOW),
        pytest.param((8, 5), (88, 5), (1, 4, 2), marks=SLOW),
    ],
)
def test_tensors_that_are_divided_alike_have_the_same_routes(
    shape: tuple[int, ...], longer: tuple[int, ...], mesh: tuple[int, ...], grad: bool
) -> None:
    sources, wanted = layouts_of(len(mesh), grad)
    known: KnownRoutes = {}
    for some in (shape, longer):
        paths = all_paths(sources, wanted, some, mesh, needs_grad=grad, known=known)
        check(paths, sources, wanted, some, mesh, grad)
    alike = all(a == b or a % math.prod(mesh) == b % math.prod(mesh) == 0 for a, b in zip(shape, longer, strict=True))
    assert len(known) == (1 if alike else 2)


def layouts_of(axes: int, grad: bool) -> tuple[list[Layout], list[Layout]]:
    placements = [*VALUES, R_PLUS] if grad else VALUES
    layouts = [Layout(some) for some in itertools.product(placements, repeat=axes)]
    return layouts[:: 1 + axes // 3], layouts[:: 1 + 2 * (axes // 3)]


def check(
    paths: Paths, sources: list[Layout], wanted: list[Layout], shape: tuple[int, ...], mesh: tuple[int, ...], grad: bool
) -> None:
    found = 0
    for (i, source), (j, layout) in itertools.product(enumerate(sources), enumerate(wanted)):
        alone = one(source, layout, shape, mesh, grad)
        if paths.possible[i, j]:
            assert [sent(paths, n) for n in paths.numbers[i, j] if n >= 0] == [
                (step.axis, step.forward, step.backward) for step in alone or ()
            ]
            found += 1
        else:
            assert alone is None
    assert found > len(sources)
