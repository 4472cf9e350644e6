"""Bytes of a stage as expressions of the ILP's variables, from which memory rows are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.cost.memory.moving import Moving
from autopar.cost.structure.levels import Span
from autopar.solver.linear.terms import Array
from autopar.solver.seconds.replays import Expression

UNIT = float(1 << 20)  # bytes per unit of a row: rows count MiB, since solvers work best with coefficients near 1

Part = tuple[int, Span]  # a level of recompute, and one of its segments
BucketBytes = Callable[[str, Sequence[Sequence[tuple[Moving, int]]], bool], int | None]
"""Makes a variable for the bytes of a kind (a field of `Moving`) of the largest bucket of some reads: of all together
or, unless the flag `together` is set, of any parameter alone. Each read is a list of ways to move, with variables of
which at most one is 1. They are summed in one row: a row per variable would be many rows, and a looser relaxation."""


@dataclass
class StageBytes:
    """Expressions in bytes; "keeps" is for backward.

    `block`, `parameters`: what one block keeps (the latter: of copies of parameters), by the op that first keeps it.
    `held`: all blocks after forward; `held_but_one`: by level, all blocks of that level or higher but the last of them;
    `held_but_two`: all blocks but the last two; `least`: by level, the least that a block of it keeps.
    `inputs`, `first_inputs`: inputs of all blocks recomputed as a whole, and of the first of them.
    `gradients`: of one block, once reduced; `each_gradient`: the same by parameter, with the choices that it depends
    on; `shared_gradients`: those of other stages' parameters whose last reader is in this stage.
    `freed`, `besides`: of one block by segment, what is gone when the segment's ops have run, and what the segment
    keeps of what it reads and nobody else keeps.
    `brought`: what the block before keeps too and `held` counts with this block alone, from the start (-1) until an op,
    at levels below `brought_until`. `unkept`: what the block returns, likewise, until an op keeps it.
    `most_left_behind`: the most bytes that the buckets of its gradients leave in the next block's turn."""

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
        """No bytes yet, with lists for `depth` levels: not recomputed, and the levels below the whole block."""
        held_but_one, least = ([dict[int, float]() for _ in range(depth)] for _ in range(2))
        return cls(held_but_one=held_but_one, least=least)


def keep(target: dict[int, Expression], op: int, variable: int, coefficient: float) -> None:
    add(target.setdefault(op, {}), variable, coefficient)


def add(target: Expression, variable: int, coefficient: float) -> None:
    if coefficient:
        target[variable] = target.get(variable, 0.0) + coefficient


def total(some: Expression, more: Expression) -> Expression:
    """The sum of two expressions, without terms that are 0."""
    found = dict(some)
    for variable, size in more.items():
        add(found, variable, size)
    return {variable: size for variable, size in found.items() if size}
