"""Blocks that are equal in everything that memory and time depend on, so that one of them stands for many.

A repeat (`cost.structure.blocks`) has equal labels and edges. The prediction for a block also depends on the strides of
its tensors, on the parameters behind its nodes, on which other nodes read its tensors, and on its neighbours. Suppose
that blocks 1 to m - 1 of a repeat of m blocks are equal in all this, and that what they make is read only in the same
block and the next, or is returned by all of them. Then block 2 stands for blocks 2 to m - 2 (the *middle*), since these
also have equal neighbours on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.cost.structure.blocks import Repeat
from autopar.graph import BIAS_OF, COST, KIND, TensorRef, output_tensors

if TYPE_CHECKING:
    from autopar.cost.memory.formulas import StepMemory

MODEL = 2
"""The number of the block that stands for all blocks in the middle."""
_LEAST = 6  # blocks that a repeat must have to be folded: then at least one block need not be evaluated


@dataclass(frozen=True, eq=False)
class Fold:
    """A repeat that has a middle; `nodes` and their `position` are those of the whole graph."""

    repeat: Repeat
    nodes: Sequence[fx.Node]
    position: dict[fx.Node, int]

    @property
    def middle(self) -> range:
        """The blocks that are equal to the model, including itself."""
        return range(MODEL, self.repeat.count - 1)

    @property
    def unseen(self) -> range:
        """The positions of the blocks that need not be evaluated: those of the middle but for its first two."""
        return range(self.repeat.instance(MODEL + 2).start, self.repeat.instance(self.repeat.count - 1).start)

    def block(self, position: int) -> int:
        """The number of the block at a position; -1 outside the repeat."""
        repeat = self.repeat
        return (position - repeat.start) // repeat.period if repeat.start <= position < repeat.end else -1

    def block_nodes(self, block: int) -> Sequence[fx.Node]:
        span = self.repeat.instance(block)
        return self.nodes[span.start : span.stop]

    def is_middle(self, node: fx.Node) -> bool:
        return self.block(self.position[node]) in self.middle

    def moved(self, ref: TensorRef, blocks: int) -> TensorRef:
        """The tensor's counterpart so many blocks later; a tensor that is made outside the repeat, or by its first or
        last block, has none and is returned itself."""
        at = self.position[ref.node]
        if 0 < self.block(at) < self.repeat.count - 1:
            return TensorRef(self.nodes[at + blocks * self.repeat.period], ref.index)
        return ref

    def model_of(self, node: fx.Node) -> fx.Node:
        """The model's node that stands for a node of the middle."""
        at = self.position[node]
        return self.nodes[at - (self.block(at) - MODEL) * self.repeat.period]


def find_folds(memory: StepMemory) -> tuple[Fold, ...]:
    """The repeats of `memory` that have a middle."""
    nodes = list(memory.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    folds = [Fold(repeat, nodes, position) for repeat in memory.repeats if repeat.count >= _LEAST]
    return tuple(fold for fold in folds if _is_uniform(fold, memory))


def _is_uniform(fold: Fold, memory: StepMemory) -> bool:
    """Whether the blocks of a repeat satisfy the conditions in the module's docstring."""
    repeat, nodes = fold.repeat, fold.nodes
    second = _facts(fold, 1, memory)
    if any(_facts(fold, block, memory) != second for block in range(2, repeat.count)):
        return False
    reaching = _reaching_further(fold, 1)
    if any(_reaching_further(fold, block) != reaching for block in range(2, repeat.count - 1)):
        return False
    for offset, at in enumerate(repeat.instance(1)):
        if not _stays(fold, memory, nodes[repeat.instance(MODEL).start + offset]):
            return False
        is_returned = bool(output_tensors(nodes[at])) and any(user.op == "output" for user in nodes[at].users)
        if reaching[offset] != is_returned:
            return False
        if reaching[offset] and not all(
            _is_returned_alone(fold, block, offset) for block in range(1, repeat.count - 1)
        ):
            return False
    return True


def _facts(fold: Fold, block: int, memory: StepMemory) -> tuple[list[Any], ...]:
    """The facts of a block that its labels and edges do not include; they must be equal too."""
    start, nodes = fold.repeat.instance(block).start, fold.block_nodes(block)
    costs = [node.meta.get(COST) for node in nodes]
    kinds = [node.meta.get(KIND) for node in nodes]
    biases = [fold.position[bias] - start if (bias := node.meta.get(BIAS_OF)) else None for node in nodes]
    others = [_facts_of_one(node, memory) for node, kind in zip(nodes, kinds, strict=True) if kind is None]
    passed, holding = memory.savings.passed, memory.savings.holding
    freed = [(node in passed, node in holding) for node in nodes]
    return costs, kinds, biases, others, freed


def _facts_of_one(node: fx.Node, memory: StepMemory) -> tuple[object, ...]:
    """The facts of a node without a `KIND`, that is, not a call."""
    strides = [_strides(tensor) for tensor in output_tensors(node)]
    if not memory.is_parameter(node):
        return (strides,)
    return strides, memory.is_trainable(node), memory.stored_dtype(node)


def _reaching_further(fold: Fold, block: int) -> list[bool]:
    """For each node whether it is read after the next block; False for nodes without tensors, which take no memory."""
    until, position = fold.repeat.instance(block + 1).stop, fold.position
    return [
        bool(output_tensors(node)) and max(map(position.__getitem__, node.users), default=0) >= until
        for node in fold.block_nodes(block)
    ]


def _is_returned_alone(fold: Fold, block: int, offset: int) -> bool:
    """Whether after the next block only the graph's output reads the node."""
    until = fold.repeat.instance(block + 1).stop
    users = fold.block_nodes(block)[offset].users
    return all(user.op == "output" for user in users if fold.position[user] >= until)


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided else None


def _stays(fold: Fold, memory: StepMemory, node: fx.Node) -> bool:
    """Whether the storages of a model node's outputs were made in the model block or outside the repeat."""
    refs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
    return all(fold.block(fold.position[memory.roots[ref].node]) in (-1, MODEL) for ref in refs)
