"""What the caller holds of a call's outputs, as expressions of the program's variables.

What nobody keeps for backward counts always. What is kept is among what a block keeps, and stays when the backward of
the block is through, as its gradients do. With these it counts, where each block of a stage returns one such tensor
(keys and values of a cache, say); where that is not so, or several micro-batches leave the gradients of several blocks
elsewhere, it counts always too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.graph import TensorRef
from autopar.solver.linear import Array
from autopar.solver.model import Model
from autopar.solver.replays import Expression
from autopar.solver.stage_bytes import add


@dataclass
class Returned:
    """Bytes that count `always`; `once` all activations are gone; and of one block, by stage: all, and each tensor's
    with the choices that it depends on. `kept`: the latter, of all choices, with the storages behind them as the first
    block has them."""

    always: Expression = field(default_factory=dict)
    once: Expression = field(default_factory=dict)
    by_stage: dict[int, tuple[Expression, list[tuple[Array, Expression]]]] = field(default_factory=dict)
    kept: list[tuple[TensorRef, Expression]] = field(default_factory=list)

    @classmethod
    def by(cls, model: Model, output: int) -> Returned:
        """What the graph's output, the op of that number, returns."""
        problem, found, op = model.problem, cls(), model.problem.ops[output]
        sizes: dict[tuple[int, ...], list[list[int]]] = {}  # by what makes a storage, and a view: of blocks, by choice
        for i, ref in enumerate(problem.memory.inputs[op.node]):
            for variable, choice in zip(model.x[output], op.choices, strict=True):
                add(found.always, variable, problem.memory.output_bytes(ref, choice.strategy.inputs[i]))
            each = [problem.memory.output_bytes(ref, one.strategy.inputs[i], kept=True) for one in op.choices]
            if any(each):
                root = problem.memory.roots[ref]
                key = problem.op_of[root.node], root.index, problem.op_of[ref.node], ref.index
                sizes.setdefault(key, []).append(each)
        for (maker, index, *_), blocks in sizes.items():
            stage = problem.ops[maker].stage
            count = problem.stages[stage].count
            if len(blocks) != count or (problem.memory.micro_batches > 1 and count > 1):
                for variable, of_each in zip(model.x[output], zip(*blocks, strict=True), strict=True):
                    add(found.always, variable, sum(of_each))
                continue
            mine: Expression = {}
            a_block, each_of_it = found.by_stage.setdefault(stage, ({}, []))
            for variable, of_each in zip(model.x[output], zip(*blocks, strict=True), strict=True):
                add(found.once, variable, sum(of_each))
                add(mine, variable, max(of_each))
                add(a_block, variable, max(of_each))
            each_of_it.append((np.array(model.x[output]), mine))
            each_choice = dict(zip(model.x[output], map(float, map(max, zip(*blocks, strict=True))), strict=True))
            found.kept.append((TensorRef(problem.ops[maker].node, index), each_choice))
        return found
