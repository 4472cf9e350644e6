"""Strategies of nodes that are not ops: inputs, parameters, constants, the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Sequence
from functools import cache, partial

from autopar.errors import InputError
from autopar.layout import Layout, Placement, R, fills, shard
from autopar.strategies.strategy import Strategy

Shape = tuple[int, ...]
Mesh = tuple[int, ...]


def stored(shape: Shape, mesh_shape: Mesh, ragged: Container[int] = ()) -> tuple[Strategy, ...]:
    """How a parameter can be stored: replicated, or in contiguous shards.

    Shards are uneven on dims in `ragged`, which ops read in uneven pieces, or where no dim can be cut evenly. The
    latter are gathered before an op reads them, so the last ranks may hold nothing: of 4096 rows on 192 ranks, 187 hold
    some.
    """
    return _one_output(_plain_layouts(shape, range(len(shape)), mesh_shape, ragged))


def placeholder(shape: Shape, mesh_shape: Mesh, inputs: str, dim: int = 0) -> tuple[Strategy, ...]:
    """A placeholder: the same on every rank ("global"), or each rank has its part of `dim`, in rank order ("local").

    Scalars and tensors with one row cannot be cut: they are the same on every rank in either case.

    Raises InputError if the number of rows is not a multiple of the number of ranks.
    """
    axes = len(mesh_shape)
    if inputs == "global" or not shape or shape[dim] == 1:
        return _one_output([Layout.replicated(axes)])
    ranks = math.prod(mesh_shape)
    if shape[dim] % ranks:
        raise InputError(
            f'with inputs="local" each of the {ranks} ranks passes an equal part of the rows of the example, '
            f"which has {shape[dim]}: give an example of the whole batch, with a multiple of {ranks} rows"
        )
    return _one_output([_fitted(shape, (dim,) * axes, mesh_shape)])


def replicated(inputs: int, outputs: int, axes: int) -> tuple[Strategy, ...]:
    """The single strategy of an op that is not split: everything replicated."""
    whole = Layout.replicated(axes)
    return (Strategy((whole,) * inputs, (whole,) * outputs, ("",) * axes),)


def returned(
    shapes: Sequence[Shape],
    choices: Sequence[tuple[int, ...]],
    mesh_shape: Mesh,
    ragged: Sequence[Iterable[int]] = (),
) -> tuple[Strategy, ...]:
    """The output node: every axis takes one of the `choices` (a dim for each tensor, -1 for whole); the first choice
    shards nothing.

    `ragged`: for each tensor the dims that may be cut into unequal pieces.
    """
    by_layouts: dict[tuple[Layout, ...], Strategy] = {}
    uneven = [frozenset(dims) for dims in ragged] or [frozenset[int]()] * len(shapes)
    fitted = cache(partial(_fitted, mesh_shape=mesh_shape))  # many equal tensors: every layer's keys and values
    for choice in itertools.product(*(choices if n > 1 else choices[:1] for n in mesh_shape)):
        tensors = zip(shapes, zip(*choice, strict=True), uneven, strict=True)
        layouts = tuple(fitted(shape, dims, ragged=marked) for shape, dims, marked in tensors)
        names = tuple(" ".join(f"dim{d}" for d in sorted({*c} - {-1})) for c in choice)
        by_layouts.setdefault(layouts, Strategy(layouts, (), names))
    return tuple(by_layouts.values())


def _fitted(shape: Shape, choice: Sequence[int], mesh_shape: Mesh, ragged: Container[int] = ()) -> Layout:
    """The layout that shards by `choice`, except over axes where that would be uneven and the dim is not `ragged`:
    over these it is replicated."""
    placements: list[Placement] = [R] * len(mesh_shape)
    for axis, dim in enumerate(choice):
        if 0 <= dim < len(shape):
            trial = list(placements)
            trial[axis] = shard(dim, _outer(placements, dim, mesh_shape))
            if _may_lie(Layout(tuple(trial)), shape, mesh_shape, ragged):
                placements = trial
    return Layout(tuple(placements))


def _outer(placements: Iterable[Placement], dim: int, mesh_shape: Sequence[int]) -> int:
    """The `outer` of the next digit of `dim`, inside those of the axes that already shard it."""
    outer = 1
    for placement, n in zip(placements, mesh_shape, strict=True):
        outer *= n if placement.is_sharded and placement.dim == dim else 1
    return outer


def _plain_layouts(shape: Shape, dims: Iterable[int], mesh_shape: Mesh, marked: Container[int]) -> list[Layout]:
    """Replicated first, then every way to shard some of `dims` contiguously.

    The `marked` dims may be cut unevenly; other dims only over a set of axes for which there is no even way.
    """
    options = [-1, *dims]
    allowed, others = [], []
    for choice in itertools.product(*(options if n > 1 else options[:1] for n in mesh_shape)):
        placements: list[Placement] = []
        for dim in choice:
            placements.append(R if dim < 0 else shard(dim, _outer(placements, dim, mesh_shape[: len(placements)])))
        layout = Layout(tuple(placements))
        if _may_lie(layout, shape, mesh_shape, marked):
            allowed.append(layout)
        elif layout.is_legal(shape, mesh_shape, ragged=True) and _long_enough(layout, shape, mesh_shape):
            others.append(layout)
    covered = {_used(layout) for layout in allowed}
    return allowed + [x for x in others if _used(x) not in covered]


def _may_lie(layout: Layout, shape: Shape, mesh_shape: Mesh, ragged: Container[int]) -> bool:
    """Whether every dim is cut evenly, or is `ragged` and cut such that no rank's piece is empty."""
    if layout.is_legal(shape, mesh_shape):
        return True
    if not layout.is_legal(shape, mesh_shape, ragged=True) or not _filled(layout, shape, mesh_shape):
        return False
    uneven = (
        dim
        for dim, length in enumerate(shape)
        if length % math.prod(digit.size for digit in layout.digits(dim, mesh_shape))
    )
    return all(dim in ragged for dim in uneven)


def _used(layout: Layout) -> tuple[bool, ...]:
    return tuple(p.is_sharded for p in layout.placements)


def _long_enough(layout: Layout, shape: Shape, mesh_shape: Mesh) -> bool:
    """Whether every dim has at least as many elements as ranks cut it; a shorter one is not worth cutting."""
    digits = (layout.digits(dim, mesh_shape) for dim in range(len(shape)))
    return all(math.prod(d.size for d in cut) <= length for length, cut in zip(shape, digits, strict=True))


def _filled(layout: Layout, shape: Shape, mesh_shape: Mesh) -> bool:
    """Whether a ragged layout leaves no rank with an empty piece."""
    digits = (layout.digits(dim, mesh_shape) for dim in range(len(shape)))
    return all(fills(length, [digit.size for digit in cut]) for length, cut in zip(shape, digits, strict=True))


def _one_output(layouts: Iterable[Layout]) -> tuple[Strategy, ...]:
    def names(layout: Layout) -> tuple[str, ...]:
        return tuple("" if p.is_replicated else str(p) for p in layout.placements)

    return tuple(Strategy((), (layout,), names(layout)) for layout in dict.fromkeys(layouts))
