"""Bytes of a stage as expressions of the program's variables, which memory rows add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.cost.memory.moving import Moving
from autopar.cost.structure.levels import Span
from autopar.solver.linear.terms import Array
from autopar.solver.seconds.replays import Expression

UNIT = float(1 << 20)  # rows count MiB: solvers like numbers near one

Part = tuple[int, Span]  # a level of recompute, and one of its segments
BucketBytes = Callable[[str, Sequence[Sequence[tuple[Moving, int]]], bool], int | None]
"""A variable for the bytes of a kind (a field of `Moving`) of the largest bucket of what is read: all of it or, unless
only those `together` count, any one by itself. Each read has several ways to move, with variables of which at most one
is 1: a row for each variable would be many rows, and a looser relaxation."""


@dataclass
class StageBytes:
    """Expressions in bytes: one block, by the op that first keeps it (`parameters`: of copies of these); all blocks
    after forward; by level, all blocks of at least that level but the last of that level (of any level: but the
    last two); the least that one block at a level keeps; inputs of blocks recomputed as a whole, and of the first
    of them; gradients of one block (by parameter, of all), and of shared parameters, once reduced. Of one block, by
    segment: what is `freed` when its own ops are through with it, and what is kept of what it reads and nobody
    keeps (`besides`). `brought`: what the block before keeps and `held` leaves to this one, which keeps it too,
    from the start (-1) until an op; at levels up to `brought_until`. `unkept`: what it returns, likewise, until an
    op keeps it. `most_left_behind`: of the buckets of its gradients in the next block's turn."""

    block: dict[int, Expression] = field(default_factory=dict)
    parameters: dict[int, Expression] = field(default_factory=dict)
    held: Expression = field(default_factory=dict)
    held_but_one: list[Expression] = field(default_factory=lambda: [{}])
    held_but_two: Expression = field(default_factory=dict)
    least: list[Expression] = field(default_factory=lambda: [{}])
    inputs: Expression = field(default_factory=dict)
    first_inputs: Expression = field(default_factory=dict)
    gradients: Expression = field(default_factory=dict)
    each_gradient: list[tuple[Array, Expression]] = field(default_factory=list)
    shared_gradients: Expression = field(default_factory=dict)
    freed: dict[Part, Expression] = field(default_factory=dict)
    besides: dict[Part, Expression] = field(default_factory=dict)
    brought: dict[int, Expression] = field(default_factory=dict)
    brought_until: int = 0
    unkept: dict[int, Expression] = field(default_factory=dict)
    most_left_behind: int = 0

    @classmethod
    def of_depth(cls, depth: int) -> StageBytes:
        """Nothing yet, at so many levels of recompute below the whole block, or at none."""
        held_but_one, least = ([dict[int, float]() for _ in range(depth)] for _ in range(2))
        return cls(held_but_one=held_but_one, least=least)


def keep(target: dict[int, Expression], op: int, variable: int, coefficient: float) -> None:
    add(target.setdefault(op, {}), variable, coefficient)


def add(target: Expression, variable: int, coefficient: float) -> None:
    if coefficient:
        target[variable] = target.get(variable, 0.0) + coefficient


def total(some: Expression, more: Expression) -> Expression:
    """Their sum, without what is 0."""
    found = dict(some)
    for variable, size in more.items():
        add(found, variable, size)
    return {variable: size for variable, size in found.items() if size}
