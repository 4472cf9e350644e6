"""Bytes that the caller holds of a call's outputs, as expressions of the program's variables.

An output that no op keeps for backward counts always. One that an op keeps is among the block's saved tensors until the
block's backward ends, and stays from then on, as the block's gradients do. So if each block of a stage returns one such
tensor (keys and values of a cache, say), it counts with the gradients. Otherwise, or if a stage of several blocks has
its gradients elsewhere because of micro-batches, it counts always too. Outputs kept in another layout are in
`solver.memory.held_by_caller`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.cost.memory.cuts import Cuts
from autopar.cost.memory.formulas import Copy
from autopar.graph import TensorRef
from autopar.solver.linear.terms import Array
from autopar.solver.memory.stage_bytes import add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression

ByChoice = tuple[Copy, ...]  # the copy of a storage under each choice of the output


@dataclass
class Kept:
    """A tensor that each block of a stage returns and keeps: its storage in the first block; its bytes by choice of the
    output (by that choice's variable); and the copies of each block."""

    root: TensorRef
    sizes: Expression
    copies: list[ByChoice]


@dataclass
class Returned:
    """Bytes of outputs: those that count `always`; those that count `once` all saved tensors are gone; and, by stage,
    those of one block: their sum, and each tensor's with the choices that it depends on. `kept`: these tensors."""

    always: Expression = field(default_factory=dict)
    once: Expression = field(default_factory=dict)
    by_stage: dict[int, tuple[Expression, list[tuple[Array, Expression]]]] = field(default_factory=dict)
    kept: dict[int, list[Kept]] = field(default_factory=dict)

    @classmethod
    def by(cls, model: Model, output: int) -> Returned:
        """From what the graph's output, the op of the number `output`, returns."""
        problem, returned, op, choices = model.problem, cls(), model.problem.ops[output], model.x[output]
        memory = problem.memory
        held_by_choice = [memory.savings.held_copies(op.node, choice.strategy) for choice in op.choices]
        for variable, sizes in zip(choices, held_by_choice, strict=True):
            add(returned.always, variable, sum(size for copy, size in sizes.items() if not memory.is_kept(copy[0])))
        by_place: dict[tuple[int, int, tuple[Cuts, ...]], dict[TensorRef, ByChoice]] = {}  # by place in a block, cuts
        for i, ref in enumerate(memory.inputs[op.node]):
            root = memory.roots[ref]
            copies = tuple(memory.copy(ref, choice.strategy.inputs[i]) for choice in op.choices)
            if memory.is_kept(root) and any(copy in sizes for copy, sizes in zip(copies, held_by_choice, strict=True)):
                key = problem.op_of[root.node], root.index, tuple(cuts for _, cuts in copies)
                by_place.setdefault(key, {})[root] = copies
        for (maker, index, _), blocks in by_place.items():
            stage = problem.ops[maker].stage
            count = problem.stages[stage].count
            by_choice = [
                (variable, [sizes.get(copies[i], 0) for copies in blocks.values()])
                for i, (variable, sizes) in enumerate(zip(choices, held_by_choice, strict=True))
            ]
            if len(blocks) != count or (memory.micro_batches > 1 and count > 1):
                for variable, of_blocks in by_choice:
                    add(returned.always, variable, sum(of_blocks))
                continue
            of_tensor: Expression = {}
            a_block, by_tensor = returned.by_stage.setdefault(stage, ({}, []))
            for variable, of_blocks in by_choice:
                add(returned.once, variable, sum(of_blocks))
                add(of_tensor, variable, max(of_blocks))
                add(a_block, variable, max(of_blocks))
            by_tensor.append((np.array(choices), of_tensor))
            sizes_of_it = {variable: float(max(of_blocks)) for variable, of_blocks in by_choice}
            kept_tensor = Kept(TensorRef(problem.ops[maker].node, index), sizes_of_it, list(blocks.values()))
            returned.kept.setdefault(stage, []).append(kept_tensor)
        return returned
