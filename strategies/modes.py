"""From a bound rule to strategies: the modes of one mesh axis, and their products over all axes.

Over one axis an op can

- run replicated;
- split a factor f at a position: tensors that have f are sharded; an input without it gets a partial gradient (R+);
  an output without it is partial (P), or replicated where the rule says `whole`;
- split two factors at once, each in the tensors that have it, where local code exchanges what belongs together;
- if it is linear, pass a partial value (P → P) or a partial gradient (R+ → R+) through.

Since the op at one coordinate of an axis is the same op on smaller tensors, every combination of modes over the axes is
correct too. Several axes may split the same factor: their digits nest in axis order, and on two axes also in the
reverse order.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from autopar.layout import R_PLUS, Join, Layout, P, Placement, R, fills, shard
from autopar.strategies.bind import Bound
from autopar.strategies.inner import inner_collectives
from autopar.strategies.rule import Note
from autopar.strategies.strategy import Strategy


class TensorFact(NamedTuple):
    """What strategies need to know of a tensor; `grad`: it requires a gradient; `item_bytes`: bytes of one element."""

    shape: tuple[int, ...]
    floating: bool
    grad: bool
    item_bytes: int

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorFact:
        """The facts of a (data-free) tensor."""
        floating = tensor.is_floating_point() or tensor.is_complex()
        return TensorFact(tuple(tensor.shape), floating, tensor.requires_grad, tensor.element_size())


class Position(NamedTuple):
    """A digit of a factor that an axis may split: the factor's number, and the digit's `outer` within the factor."""

    factor: int
    outer: int


@dataclass(frozen=True)
class Mode:
    """What one axis does: one placement for each tensor (inputs, then outputs), as if it were the only axis."""

    name: str
    placements: tuple[Placement, ...]
    positions: tuple[Position, ...] = ()
    local: str = ""
    work: float = 1.0  # of the device that does most, over an equal share of the work
    idle: bool = False  # splitting saves no work


class Passing(NamedTuple):
    """What passes through an op: partial values in these groups of operands (`linear_groups`), and, if `gradient`,
    partial gradients."""

    groups: tuple[tuple[int, ...], ...]
    gradient: bool


def everything_passes(bound: Bound, facts: Sequence[TensorFact]) -> Passing:
    """Everything that the rule allows to pass."""
    words = bound.operation.words
    any_gradient = any(_computes_gradient(bound, facts))
    groups = linear_groups(bound, facts)
    return Passing(groups, any_gradient and bool(words & {"linear", "affine"} or bound.operation.operands))


def linear_groups(bound: Bound, facts: Sequence[TensorFact]) -> tuple[tuple[int, ...], ...]:
    """The sets of inputs in which the op is jointly linear: if all of a set are partial values, so is the output."""
    note = bound.operation
    if not all(f.floating for f in facts[bound.inputs :]):
        return ()
    groups = [tuple(range(bound.inputs))] if "linear" in note.words else []
    return tuple(g for g in [*groups, *note.operands] if all(facts[i].floating for i in g))


def _computes_gradient(bound: Bound, facts: Sequence[TensorFact]) -> list[bool]:
    """For each input whether backward computes a gradient for it."""
    flows = any(f.grad for f in facts[bound.inputs :])
    return [f.grad and flows for f in facts[: bound.inputs]]


def axis_modes(
    bound: Bound, facts: Sequence[TensorFact], positions: Iterable[Position], passing: Passing
) -> list[Mode]:
    """All modes of one axis, replicated first. Whether a digit fits an axis of some size is checked by `combine`."""
    with_gradient, outputs = _computes_gradient(bound, facts), facts[bound.inputs :]
    modes = [Mode("", (R,) * len(facts))]
    if passing.gradient:
        placements = [R_PLUS if w else R for w in with_gradient] + [R_PLUS if o.grad else R for o in outputs]
        modes.append(Mode("R+", tuple(placements)))
    for group in passing.groups:
        through = [P if i in group else R_PLUS if w else R for i, w in enumerate(with_gradient)]
        modes.append(Mode("P", (*through, *[P] * len(outputs))))
    positions = [position for position in positions if not _shares_gradient(bound, position, facts)]
    modes += [_split(bound, position, with_gradient) for position in positions]
    for note in bound.rule.notes:
        if note.pair:
            pair = [p for p in positions if p.outer == 1 and bound.factors[p.factor].name in note.pair]
            modes += [_split_at_once(bound, pair, note, with_gradient)] if len(pair) == len(note.pair) else []
    return modes


def _shares_gradient(bound: Bound, position: Position, facts: Sequence[TensorFact]) -> bool:
    """Whether splitting here makes the ranks join, by maximum or minimum, an output that has a gradient.

    All elements that equal the extremum share its gradient, but a rank only sees its own ones
    (`autopar.runtime.local.extrema` counts those of all ranks).
    """
    if bound.factors[position.factor].note.join not in ("max", "min"):
        return False
    outputs = zip(bound.spots[bound.inputs :], facts[bound.inputs :], strict=True)
    return any(fact.grad for spots, fact in outputs if spots[position.factor] is None)


def _split(bound: Bound, position: Position, with_gradient: Sequence[bool]) -> Mode:
    """The mode in which one axis splits one position."""
    factor = bound.factors[position.factor]
    without = R if "whole" in factor.note.words else _partial(factor.note.join)
    placements = []
    for t, spots in enumerate(bound.spots):
        spot = spots[position.factor]
        if spot is not None:
            placements.append(shard(spot.dim, spot.outer * position.outer))
        elif t < bound.inputs:
            placements.append(R_PLUS if with_gradient[t] else R)
        else:
            placements.append(without)
    name = factor.name if position.outer == 1 else f"{factor.name}@{position.outer}"
    words = factor.note.words
    work = 2.0 if "double" in words else 1.0
    return Mode(name, tuple(placements), (position,), factor.note.local, work, idle="idle" in words)


def _split_at_once(bound: Bound, pair: Sequence[Position], note: Note, with_gradient: Sequence[bool]) -> Mode:
    """The mode in which one axis splits two factors. Outputs are not partial; a tensor with neither factor is whole."""
    placements = []
    for t, spots in enumerate(bound.spots):
        spot = next((spots[p.factor] for p in pair if spots[p.factor] is not None), None)
        if spot is not None:
            placements.append(shard(spot.dim, spot.outer))
        else:
            placements.append(R_PLUS if t < bound.inputs and with_gradient[t] else R)
    return Mode(note.factor, tuple(placements), tuple(pair), note.local)


@cache
def _partial(join: Join) -> Placement:
    return Placement("partial", join=join)


@lru_cache(maxsize=1 << 16)
def _layout(placements: tuple[Placement, ...]) -> Layout:
    return Layout(placements)


def combine(
    bound: Bound,
    facts: Sequence[TensorFact],
    modes: Sequence[Mode],
    mesh_shape: tuple[int, ...],
    ragged: Container[int] = (),
) -> tuple[Strategy, ...]:
    """The legal products of the modes over the axes: all-replicated first, and each combination of layouts once, with
    the least work.

    `ragged`: the factors that may be cut into unequal pieces.
    """
    by_layouts: dict[tuple[Layout, ...], Strategy] = {}
    fitting = [[m for m in modes if _fits(bound, (m,), (n,), ragged)] if n > 1 else modes[:1] for n in mesh_shape]
    for choice in itertools.product(*fitting):
        if not _fits(bound, choice, mesh_shape, ragged):
            continue
        local = _local(bound, choice)
        if local is None:
            continue
        work = _work(bound, choice, mesh_shape)
        for layouts in _nestings(bound, facts, choice, mesh_shape):
            before = by_layouts.get(layouts)
            if before is None or work < before.work:
                inner = inner_collectives(local, bound, facts, layouts, mesh_shape) if local else ()
                names = tuple(m.name for m in choice)
                by_layouts[layouts] = Strategy(
                    layouts[: bound.inputs], layouts[bound.inputs :], names, local, work, inner
                )
    return tuple(by_layouts.values())


def _work(bound: Bound, choice: Sequence[Mode], mesh_shape: Sequence[int]) -> float:
    """The part of the op's work that the device with the most does: it has the longest of unequal pieces."""
    work, most = 1.0, 1.0
    remaining = [factor.size for factor in bound.factors]
    for mode, n in zip(choice, mesh_shape, strict=True):
        share = 1 / n
        for factor, outer in mode.positions:
            if outer == 1:
                longest = -(-remaining[factor] // n)
                share, remaining[factor] = max(share, longest / remaining[factor]), longest
        if mode.positions and n > 1 and not mode.idle:
            work, most = work * share, max(most, mode.work)
    return min(1.0, most * work)


def _fits(bound: Bound, choice: Sequence[Mode], mesh_shape: Sequence[int], ragged: Container[int]) -> bool:
    """Whether each factor's length is divisible by the digits that the axes pick from it; a factor in `ragged` may also
    be cut into unequal pieces, if none of them is empty."""
    digits: dict[Position, int] = {}
    for mode, n in zip(choice, mesh_shape, strict=True):
        for position in mode.positions:
            digits[position] = digits.get(position, 1) * n
    reach: dict[int, int] = {}
    for position, size in sorted(digits.items()):
        if position.outer % reach.get(position.factor, 1):
            return False
        reach[position.factor] = position.outer * size
    for factor, end in reach.items():
        size = bound.factors[factor].size
        if size % end:
            plain = factor in ragged and {p.outer for p in digits if p.factor == factor} == {1}
            cuts = [n for mode, n in zip(choice, mesh_shape, strict=True) for p in mode.positions if p.factor == factor]
            if not (plain and fills(size, cuts)):
                return False
    return True


def _nestings(
    bound: Bound, facts: Sequence[TensorFact], choice: Sequence[Mode], mesh_shape: Sequence[int]
) -> Iterator[tuple[Layout, ...]]:
    """The layouts of all tensors for each nesting order of axes that split the same position: mesh order, and for two
    axes also the reverse.

    In the reverse order, a dim that is already split over the second axis gets split over both without a collective.
    Unequal pieces are nested in mesh order only. So is everything on three axes: their six orders would double planning
    time for 0.02 % of a step (Llama-3-8B on 4 x 4 x 4).
    """
    axes = range(len(mesh_shape))
    yield _nested(bound, choice, mesh_shape, axes)
    picked = [position for mode in choice for position in mode.positions]
    if len(set(picked)) < len(picked) and sum(n > 1 for n in mesh_shape) == 2:
        layouts = _nested(bound, choice, mesh_shape, axes[::-1])
        if all(layout.is_legal(fact.shape, mesh_shape) for layout, fact in zip(layouts, facts, strict=True)):
            yield layouts


def _nested(
    bound: Bound, choice: Sequence[Mode], mesh_shape: Sequence[int], order: Iterable[int]
) -> tuple[Layout, ...]:
    """One layout for each tensor; of the axes that split the same position, the first in `order` is outermost."""
    parts_before: dict[Position, int] = {}
    columns: list[tuple[Placement, ...]] = [()] * len(mesh_shape)
    for axis in order:
        mode, n = choice[axis], mesh_shape[axis]
        placements = mode.placements
        for position in mode.positions:
            before = parts_before.get(position, 1)
            parts_before[position] = before * n
            if before > 1:
                holds = [spots[position.factor] is not None for spots in bound.spots]
                pairs = zip(placements, holds, strict=True)
                placements = tuple(shard(p.dim, p.outer * before) if has_factor else p for p, has_factor in pairs)
        columns[axis] = placements
    return tuple(map(_layout, zip(*columns, strict=True)))


def _local(bound: Bound, choice: Sequence[Mode]) -> str | None:
    """The name of the local code for these modes; None where two axes would need different code."""
    note = bound.operation
    split = any(mode.positions for mode in choice)
    names = {mode.local for mode in choice if mode.local}
    if note.local and (split or "always" in note.words):
        names.add(note.local)
    return None if len(names) > 1 else next(iter(names), "")
