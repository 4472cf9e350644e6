"""The planning problem: ops with their choices, the tensors between them, and stages of repeated blocks.

Equal repeated blocks are folded into one set of ops with a multiplicity. Tensors between blocks have multiplicities
too: from one block into the next `count - 1` times, into the first block and out of the last block once.
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
    """One way to run an op, or to store a parameter, with the seconds of one run, forward and backward; `regather`: the
    parameter's gathered copy is dropped after forward and gathered again."""

    strategy: Strategy
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    regather: bool = False


@dataclass(frozen=True)
class Again:
    """The recompute of an op in a block, as the lowest level (0: none) at which the op is in a segment (`dropped`), a
    replay makes the tensors that it reads (`replayed`), and a replay runs it (`computed`); `offset`: its position in
    the block."""

    dropped: int = 0
    replayed: int = 0
    computed: int = 0
    offset: int = -1


@dataclass(frozen=True)
class Op:
    """A node that has a choice; in a repeated stage it stands for the corresponding node of every block.

    `like`: an earlier op, in an equal or similar layer, whose choice this op shares (`solver.search.equal_ops`).
    """

    node: fx.Node
    stage: int
    choices: tuple[Choice, ...]
    again: Again
    like: int | None = None


def deciding(ops: Sequence[Op], number: int) -> int:
    """The number of the op that makes an op's choice."""
    like = ops[number].like
    return number if like is None else like


@dataclass(frozen=True)
class Stage:
    """A stretch of the graph: `count` equal blocks of a `repeat`, from block `first` on, or the nodes between repeats.

    `levels`: the levels at which its blocks may be recomputed; None: they are not. By constraints, no block is below
    the level `least`, and none is recomputed whole (at the last level) unless `may_be_whole`.
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
        """The number of levels."""
        return len(self.levels) if self.levels is not None else 0


@dataclass(frozen=True)
class Use:
    """Input number `index` of an op; it stands for `times` inputs that want the tensor in the same layouts."""

    op: int
    index: int
    times: int = 1


@dataclass(frozen=True)
class Tensor:
    """Output number `output` of an op, as read by `uses`, which share its conversions.

    `kind`: made and read outside repeated blocks ("plain"); made and read in the same block ("inner"); made in a block
    and read in the next ("next"); made outside and read by the first block ("first") or by every block ("outer"); made
    in every block and read outside ("each").
    """

    source: int
    output: int
    kind: Kind
    uses: tuple[Use, ...]
    stage: int  # of the uses


@dataclass(frozen=True)
class Problem:
    """All that the program is built from."""

    memory: StepMemory
    cluster: Cluster
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    stages: tuple[Stage, ...]
    repeats: tuple[Repeat, ...]
    op_of: Mapping[fx.Node, int]  # the op of every node, in all blocks

    def decides(self, number: int) -> int:
        """The op that makes an op's choice: mostly the op itself."""
        return deciding(self.ops, number)

    @cached_property
    def shares_choices(self) -> bool:
        """Whether any op shares the choice of another."""
        return any(op.like is not None for op in self.ops)

    @cached_property
    def first_region(self) -> list[int]:
        """By stage, the number of its first region: the blocks of all stages, in order, are the graph's regions
        (`cost.structure.blocks.regions`)."""
        return [sum(stage.count for stage in self.stages[:i]) for i in range(len(self.stages))]

    @cached_property
    def stage_of_region(self) -> list[int]:
        """By region, the stage that it is a block of."""
        return [i for i, stage in enumerate(self.stages) for _ in range(stage.count)]

    @cached_property
    def grouping(self) -> Grouping:
        """How parameters share collectives (buckets)."""
        return self.memory.grouping(self.repeats)

    def together(self, source: TensorRef, reader: int) -> int:
        """The lowest level at which a tensor and its reader in a recomputable stage are in one segment; for a tensor
        from outside the stage, the level at which the block is recomputed whole."""
        op = self.ops[reader]
        levels, maker = self.stages[op.stage].levels, self.op_of.get(source.node)
        assert levels is not None
        making_op = self.ops[maker] if maker is not None else None
        if (
            making_op is None
            or making_op.node is not source.node
            or making_op.stage != op.stage
            or not making_op.again.dropped
        ):
            return len(levels)
        return levels.together(making_op.again.offset, op.again.offset)

    def first_of_last(self, ref: TensorRef) -> TensorRef | None:
        """For a tensor made by the last of equal blocks, the corresponding tensor of the first; None for all others."""
        number = self.op_of.get(ref.node)
        if number is None or self.ops[number].node is ref.node:
            return None
        stage, position = self.stages[self.ops[number].stage], self.memory.lifetimes.position[ref.node]
        assert stage.repeat is not None
        last = stage.repeat.instance(stage.first + stage.count - 1)
        return TensorRef(self.ops[number].node, ref.index) if position in last else None

    def ref(self, tensor: Tensor) -> TensorRef:
        """The tensor in the graph (of a folded stage, the first block's)."""
        return TensorRef(self.ops[tensor.source].node, tensor.output)
