"""Blocks that are equal but for their place in all that memory and time depend on, so that one stands for many.

A repeat (`cost.structure.blocks`) has equal labels and edges. Beside these, what is predicted of a block depends on the
strides of its tensors, on the parameters behind its nodes, on what else reads its tensors, and on its neighbours. Of a
repeat of m blocks whose blocks 1 to m - 1 are equal in all that, and make what is read in the same block and the next
alone, or returned by all of them, block 2 stands for blocks 2 to m - 2 (the *middle*): these have equal neighbours on
both sides too.
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
"""The block that stands for all in the middle."""
_LEAST = 6  # blocks of which one at least is never looked at


@dataclass(frozen=True, eq=False)
class Fold:
    """A repeat that has a middle; `nodes` and their `position` are those of the whole graph."""

    repeat: Repeat
    nodes: Sequence[fx.Node]
    position: dict[fx.Node, int]

    @property
    def middle(self) -> range:
        """The blocks that are equal to the model, itself among them."""
        return range(MODEL, self.repeat.count - 1)

    @property
    def unseen(self) -> range:
        """Positions of the blocks that nobody needs to look at: of the middle, all but the first two."""
        return range(self.repeat.instance(MODEL + 2).start, self.repeat.instance(self.repeat.count - 1).start)

    def block(self, position: int) -> int:
        """The number of the block at a position, -1 outside."""
        repeat = self.repeat
        return (position - repeat.start) // repeat.period if repeat.start <= position < repeat.end else -1

    def block_nodes(self, block: int) -> Sequence[fx.Node]:
        span = self.repeat.instance(block)
        return self.nodes[span.start : span.stop]

    def is_middle(self, node: fx.Node) -> bool:
        return self.block(self.position[node]) in self.middle

    def moved(self, ref: TensorRef, blocks: int) -> TensorRef:
        """The same tensor so many blocks on; what is made outside, or by the first or last block, is so for all."""
        at = self.position[ref.node]
        if 0 < self.block(at) < self.repeat.count - 1:
            return TensorRef(self.nodes[at + blocks * self.repeat.period], ref.index)
        return ref

    def model_of(self, node: fx.Node) -> fx.Node:
        """The node of the model that stands for one of the middle."""
        at = self.position[node]
        return self.nodes[at - (self.block(at) - MODEL) * self.repeat.period]


def find_folds(memory: StepMemory) -> tuple[Fold, ...]:
    """The repeats of `memory` that have a middle."""
    nodes = list(memory.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    folds = [Fold(repeat, nodes, position) for repeat in memory.repeats if repeat.count >= _LEAST]
    return tuple(fold for fold in folds if _is_uniform(fold, memory))


def _is_uniform(fold: Fold, memory: StepMemory) -> bool:
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
    """What is not part of the labels and edges of a block: equal where blocks are."""
    start, nodes = fold.repeat.instance(block).start, fold.block_nodes(block)
    costs = [node.meta.get(COST) for node in nodes]
    kinds = [node.meta.get(KIND) for node in nodes]
    biases = [fold.position[bias] - start if (bias := node.meta.get(BIAS_OF)) else None for node in nodes]
    others = [_facts_of_one(node, memory) for node, kind in zip(nodes, kinds, strict=True) if kind is None]
    passed, holding = memory.savings.passed, memory.savings.holding
    freed = [(node in passed, node in holding) for node in nodes]
    return costs, kinds, biases, others, freed


def _facts_of_one(node: fx.Node, memory: StepMemory) -> tuple[object, ...]:
    """Of a node that is no call of some kind."""
    strides = [_strides(tensor) for tensor in output_tensors(node)]
    if not memory.is_parameter(node):
        return (strides,)
    return strides, memory.is_trainable(node), memory.stored_dtype(node)


def _reaching_further(fold: Fold, block: int) -> list[bool]:
    """Which nodes are read behind the next block, but those that make numbers: nothing lives for these."""
    until, position = fold.repeat.instance(block + 1).stop, fold.position
    return [
        bool(output_tensors(node)) and max(map(position.__getitem__, node.users), default=0) >= until
        for node in fold.block_nodes(block)
    ]


def _is_returned_alone(fold: Fold, block: int, offset: int) -> bool:
    """Whether nothing but the graph's output reads a node behind the next block."""
    until = fold.repeat.instance(block + 1).stop
    users = fold.block_nodes(block)[offset].users
    return all(user.op == "output" for user in users if fold.position[user] >= until)


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided else None


def _stays(fold: Fold, memory: StepMemory, node: fx.Node) -> bool:
    """Whether a node of the model keeps what it makes in a storage of its own block, or of what is before all."""
    refs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
    return all(fold.block(fold.position[memory.roots[ref].node]) in (-1, MODEL) for ref in refs)
