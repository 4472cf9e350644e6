"""Blocks that are equal but for their place in all that memory and time depend on, so that one stands for many.

A repeat (`autopar.cost.blocks`) has equal labels and edges. Beside these, what is predicted of a block depends on the
strides of its tensors, on the parameters behind its nodes, on what else reads its tensors, and on its neighbours. Of a
repeat of m blocks whose blocks 1 to m - 1 are equal in all that, and make what is read in the same block and the next
alone, or returned by all of them, block 2 stands for blocks 2 to m - 2 (the *middle*): these have equal neighbours on
both sides too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.cost.blocks import Repeat
from autopar.graph import BIAS_OF, COST, KIND, TensorRef, output_tensors

if TYPE_CHECKING:
    from autopar.cost.memory import StepMemory

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
    repeat, nodes, position = fold.repeat, fold.nodes, fold.position
    last = repeat.instance(repeat.count - 1).start
    for offset, first in enumerate(repeat.instance(1)):
        mine = nodes[first]
        returned = any(user.op == "output" for user in mine.users)
        if not _stays(fold, memory, nodes[repeat.instance(MODEL).start + offset]):
            return False
        for at in range(first, repeat.end, repeat.period):
            node, until = nodes[at], at - offset + 2 * repeat.period
            if at < last:
                reaches_further = max(map(position.__getitem__, node.users), default=at) >= until
                if reaches_further != returned:
                    return False
                if reaches_further and any(user.op != "output" for user in node.users if position[user] >= until):
                    return False
            if node is not mine and not _alike(mine, node, at - first, fold, memory):
                return False
    return True


def _alike(one: fx.Node, other: fx.Node, distance: int, fold: Fold, memory: StepMemory) -> bool:
    """Whether two nodes with equal labels and edges are equal in what is not part of these."""
    facts, others = one.meta, other.meta
    bias, its = facts.get(BIAS_OF), others.get(BIAS_OF)
    if (bias is None) != (its is None) or (bias and its and fold.position[its] - fold.position[bias] != distance):
        return False
    mine, cost = facts.get(COST), others.get(COST)
    if mine is not cost and mine != cost:
        return False
    if KIND in facts or KIND in others:
        return bool(facts.get(KIND) == others.get(KIND))
    if [_strides(t) for t in output_tensors(one)] != [_strides(t) for t in output_tensors(other)]:
        return False
    if memory.is_parameter(one) and memory.is_parameter(other):
        return (memory.is_trainable(one), memory.stored_dtype(one)) == (
            memory.is_trainable(other),
            memory.stored_dtype(other),
        )
    return memory.is_parameter(one) == memory.is_parameter(other)


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout == torch.strided else None


def _stays(fold: Fold, memory: StepMemory, node: fx.Node) -> bool:
    """Whether a node of the model keeps what it makes in a storage of its own block, or of what is before all."""
    refs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
    return all(fold.block(fold.position[memory.roots[ref].node]) in (-1, MODEL) for ref in refs)
