"""The planning problem: ops with their choices, the tensors between them, and the stages that repeat.

Equal repeated blocks are one set of ops with a multiplicity. Edges between them carry how often they occur: from one
block into the next `count - 1` times, into the first and out of the last block once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.blocks import Repeat
from autopar.cost.structure.levels import Levels
from autopar.graph import TensorRef
from autopar.strategies.strategy import Strategy

Kind = Literal["plain", "inner", "first", "next", "outer", "each"]


@dataclass(frozen=True)
class Choice:
    """One way to run an op, or to store a parameter; seconds of one run, forward and backward."""

    strategy: Strategy
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    regather: bool = False


@dataclass(frozen=True)
class Again:
    """The levels of recompute from which on (0: at none) an op of a block is in a segment, a replay makes what it
    reads, and a replay computes it; `offset`: its place in the block."""

    dropped: int = 0
    replayed: int = 0
    computed: int = 0
    offset: int = -1


@dataclass(frozen=True)
class Op:
    """A node that has a choice; in a repeated stage it stands for that node of every block.

    `like`: the op that makes its choice, in another layer like its own, which comes before it
    (`solver.search.equal_ops`).
    """

    node: fx.Node
    stage: int
    choices: tuple[Choice, ...]
    again: Again
    like: int | None = None


def deciding(ops: Sequence[Op], number: int) -> int:
    """Of the ops of a problem the one that makes an op's choice."""
    like = ops[number].like
    return number if like is None else like


@dataclass(frozen=True)
class Stage:
    """A stretch of the graph: `count` equal blocks (`repeat`, blocks `first` and on), or what lies between.

    `levels`: those at which its blocks may be recomputed, if any; the user asks that none is below the level `least`,
    and whether one `may_be_whole`, at the last level.
    """

    count: int
    ops: tuple[int, ...]
    repeat: Repeat | None = None
    first: int = 0
    levels: Levels | None = None
    least: int = 0
    may_be_whole: bool = True

    @property
    def recomputable(self) -> bool:
        return self.levels is not None

    @property
    def depth(self) -> int:
        """How many levels there are."""
        return len(self.levels) if self.levels is not None else 0


@dataclass(frozen=True)
class Use:
    """Input number `index` of an op, which stands for `times` inputs that read the tensor alike."""

    op: int
    index: int
    times: int = 1


@dataclass(frozen=True)
class Tensor:
    """Output number `output` of an op, as the ops `uses` read it, who share its conversions.

    `kind`: read outside blocks ("plain"); made and read in the same block ("inner"); made in a block and read in the
    next ("next"); made outside and read by the first block ("first") or by every block ("outer"); made in every block
    and read outside ("each").
    """

    source: int
    output: int
    kind: Kind
    uses: tuple[Use, ...]
    stage: int  # of the uses


@dataclass(frozen=True)
class Problem:
    """Everything the program is made of."""

    memory: StepMemory
    cluster: Cluster
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    stages: tuple[Stage, ...]
    repeats: tuple[Repeat, ...]
    op_of: Mapping[fx.Node, int]  # every node's op, those of all blocks

    def decides(self, number: int) -> int:
        """The op that makes an op's choice: mostly itself."""
        return deciding(self.ops, number)

    @cached_property
    def alike(self) -> bool:
        """Whether any op leaves its choice to another."""
        return any(op.like is not None for op in self.ops)

    @cached_property
    def grouping(self) -> Grouping:
        """How parameters share collectives."""
        return self.memory.grouping(self.repeats)

    def together(self, source: TensorRef, reader: int) -> int:
        """The first level at which a tensor and the op of a recomputable stage that reads it are in one segment, or at
        which the block as a whole is, where the tensor comes from outside."""
        op = self.ops[reader]
        levels, maker = self.stages[op.stage].levels, self.op_of.get(source.node)
        assert levels is not None
        made = self.ops[maker] if maker is not None else None
        if made is None or made.node is not source.node or made.stage != op.stage or not made.again.dropped:
            return len(levels)
        return levels.together(made.again.offset, op.again.offset)

    def first_of_last(self, ref: TensorRef) -> TensorRef | None:
        """Of what the last of equal blocks makes, what the first of them makes in its place; None for all else."""
        number = self.op_of.get(ref.node)
        if number is None or self.ops[number].node is ref.node:
            return None
        stage, position = self.stages[self.ops[number].stage], self.memory.lifetimes.position[ref.node]
        assert stage.repeat is not None
        last = stage.repeat.instance(stage.first + stage.count - 1)
        return TensorRef(self.ops[number].node, ref.index) if position in last else None

    def ref(self, tensor: Tensor) -> TensorRef:
        """The graph's tensor (of the first block)."""
        return TensorRef(self.ops[tensor.source].node, tensor.output)
