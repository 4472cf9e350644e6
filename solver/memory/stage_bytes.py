"""Bytes of a stage as expressions of the ILP's variables, from which memory rows are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.cost.memory.transfer_bytes import TransferBytes
from autopar.cost.structure.levels import Span
from autopar.solver.linear.terms import Array
from autopar.solver.seconds.replays import Expression

UNIT = float(1 << 20)  # bytes per unit of a row: rows count MiB, since solvers work best with coefficients near 1

Part = tuple[int, Span]  # a level of recompute, and one of its segments
BucketBytes = Callable[[str, Sequence[Sequence[tuple[TransferBytes, int]]], bool], int | None]
"""Makes a variable for the bytes in a field of `TransferBytes` of the largest bucket of some reads: of all together or,
unless the flag `together` is set, of any parameter alone. Each read is a list of possible transfers, with variables of
which at most one is 1. They are summed in one row: a row per variable would be many rows, and a looser relaxation."""


@dataclass
class BlockBytes:
    """Bytes of one block of a stage.

    `by_op`, `parameters_by_op`: what it keeps (the latter: copies of parameters), by the op that first keeps it.
    `freed`, `besides`: by segment, what is gone when the segment's ops have run, and what the segment keeps of what it
    reads and nobody else keeps. `brought`: what the block before keeps too and `KeptBytes.all_blocks` counts with this
    block alone, from the start (-1) until an op, at levels below `brought_until`. `unkept`: what the block returns,
    likewise, until an op keeps it."""

    by_op: dict[int, Expression] = field(default_factory=dict)
    parameters_by_op: dict[int, Expression] = field(default_factory=dict)
    freed: dict[Part, Expression] = field(default_factory=dict)
    besides: dict[Part, Expression] = field(default_factory=dict)
    brought: dict[int, Expression] = field(default_factory=dict)
    brought_until: int = 0
    unkept: dict[int, Expression] = field(default_factory=dict)


@dataclass
class KeptBytes:
    """What the blocks of a stage keep for backward, after forward.

    `all_blocks`; by level of recompute, `but_last`: all blocks of that level or higher but the last of them;
    `but_last_two`: all blocks but the last two; `least_by_level`: the least that a block of a level keeps. `inputs`,
    `first_inputs`: inputs of all blocks recomputed as a whole, and of the first of them."""

    all_blocks: Expression = field(default_factory=dict)
    but_last: list[Expression] = field(default_factory=lambda: [{}])
    but_last_two: Expression = field(default_factory=dict)
    least_by_level: list[Expression] = field(default_factory=lambda: [{}])
    inputs: Expression = field(default_factory=dict)
    first_inputs: Expression = field(default_factory=dict)


@dataclass
class GradientBytes:
    """Gradients of parameters.

    `of_block`: of one block, once reduced; `by_parameter`: the same for each parameter, with the choices that it
    depends on; `shared`: of other stages' parameters whose last reader is in this stage. `most_left_behind`: the most
    bytes that their buckets leave in the next block's turn."""

    of_block: Expression = field(default_factory=dict)
    by_parameter: list[tuple[Array, Expression]] = field(default_factory=list)
    shared: Expression = field(default_factory=dict)
    most_left_behind: int = 0


@dataclass
class StageBytes:
    """Expressions in bytes of a stage, a run of equal blocks."""

    block: BlockBytes = field(default_factory=BlockBytes)
    kept: KeptBytes = field(default_factory=KeptBytes)
    gradients: GradientBytes = field(default_factory=GradientBytes)

    @classmethod
    def of_depth(cls, depth: int) -> StageBytes:
        """No bytes yet, with lists for `depth` levels: not recomputed, and the levels below the whole block."""
        but_last, least = ([dict[int, float]() for _ in range(depth)] for _ in range(2))
        return cls(kept=KeptBytes(but_last=but_last, least_by_level=least))


def keep(target: dict[int, Expression], op: int, variable: int, coefficient: float) -> None:
    add(target.setdefault(op, {}), variable, coefficient)


def add(target: Expression, variable: int, coefficient: float) -> None:
    if coefficient:
        target[variable] = target.get(variable, 0.0) + coefficient


def total(terms: Expression, further: Expression) -> Expression:
    """The sum of two expressions, without terms that are 0."""
    sums = dict(terms)
    for variable, size in further.items():
        add(sums, variable, size)
    return {variable: size for variable, size in sums.items() if size}
