"""What backward needs, in bytes by stage: saved tensors as copies, statistics and masks.

A copy is a storage and the axes that cut it (`autopar.cost.memory`). Of a storage that several ops keep in one layout
there is one copy::

    s_v >= sum of x[v,.] that keep it, s_v >= s_u         one block as far as op v, of those that keep it; u before v
    k >= sum of (m x - z)[v,.], for each op v             all blocks, after forward
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cost.memory import Copy
from autopar.graph import TensorRef
from autopar.solver.model import Model
from autopar.solver.problem import Op
from autopar.solver.replays import Expression

UNIT = float(1 << 20)  # rows count MiB: solvers like numbers near one


@dataclass
class Saver:
    """An op that keeps a copy of a storage under some of its choices (their numbers)."""

    op: int
    choices: list[int] = field(default_factory=list)


@dataclass
class StageBytes:
    """Expressions in bytes: one block, by the op that first keeps it; all blocks after forward, and all but the last
    (if that is kept); inputs of recomputed blocks; gradients of one block, and of shared parameters, once reduced."""

    block: dict[int, Expression] = field(default_factory=dict)
    held: Expression = field(default_factory=dict)
    held_but_one: Expression = field(default_factory=dict)
    inputs: Expression = field(default_factory=dict)
    gradients: Expression = field(default_factory=dict)
    shared_gradients: Expression = field(default_factory=dict)


def keep(target: dict[int, Expression], op: int, variable: int, coefficient: float) -> None:
    add(target.setdefault(op, {}), variable, coefficient)


def add(target: Expression, variable: int, coefficient: float) -> None:
    if coefficient:
        target[variable] = target.get(variable, 0.0) + coefficient


class Saved:
    """Adds what the ops of a model keep to its stages."""

    def __init__(self, model: Model, stages: list[StageBytes]) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory, self.stages = model.problem.memory, stages
        self.stages_of = self._saving_stages()
        self.outer = {
            (self.memory.roots.get(self.problem.ref(t), self.problem.ref(t)), t.stage)
            for t in self.problem.tensors
            if t.kind == "outer"
        }
        self._internal()
        self._copies()

    def _held(self, stage: int) -> list[tuple[Expression, int]]:
        """Where bytes that blocks keep are counted, with the blocks that do not count."""
        data = self.stages[stage]
        return [(data.held, 0), (data.held_but_one, 1)] if self.problem.stages[stage].count > 1 else [(data.held, 0)]

    def _kept(self, number: int, choice: int, left_out: int) -> Expression:
        """In how many blocks a choice's op keeps what it saves, some left out: m x - z."""
        op = self.problem.ops[number]
        found = {self.model.x[number][choice]: float(self.model.count(op) - left_out)}
        if op.stage in self.model.recomputed:
            found[int(self.model.z(number)[choice])] = -1.0
        return found

    def _internal(self) -> None:
        for number, op in enumerate(self.problem.ops):
            internal = self.memory.saved(op.node)[2]
            if not internal:
                continue
            for i, choice in enumerate(op.choices):
                size = round(internal * choice.strategy.work)
                keep(self.stages[op.stage].block, number, self.model.x[number][i], size)
                for target, left_out in self._held(op.stage):
                    for variable, coefficient in self._kept(number, i, left_out).items():
                        add(target, variable, coefficient * size)

    def _copies(self) -> None:
        """Saved tensors: one copy per storage and axes, however many ops keep it."""
        own: dict[tuple[int, Copy], dict[int, Saver]] = {}
        shared: dict[Copy, dict[int, Saver]] = {}
        for number, op in enumerate(self.problem.ops):
            inputs, outputs, _ = self.memory.saved(op.node)
            refs = self.memory.inputs[op.node]
            for i, choice in enumerate(op.choices):
                wanted = [
                    (refs[j], choice.strategy.inputs[j]) for j in inputs if not self.memory.is_parameter(refs[j].node)
                ]
                made = [(TensorRef(op.node, j), choice.strategy.outputs[j]) for j in outputs]
                for ref, layout in dict.fromkeys(wanted + made):
                    copy = self.memory.copy(ref, layout)
                    if self.memory.copy_bytes(copy):
                        alone = self._owner(copy[0], op) == op.stage
                        savers = own.setdefault((op.stage, copy), {}) if alone else shared.setdefault(copy, {})
                        saver = savers.setdefault(number, Saver(number))
                        if i not in saver.choices:
                            saver.choices.append(i)
        for (stage, copy), savers in own.items():
            self._own_copy(stage, self.memory.copy_bytes(copy), list(savers.values()))
        for copy, savers in shared.items():
            self._shared_copy(self.memory.copy_bytes(copy), list(savers.values()))

    def _owner(self, root: TensorRef, op: Op) -> int | None:
        """The stage whose blocks each keep a storage of their own, None if several stages or blocks keep the same."""
        if len(self.stages_of.get(root, set())) > 1:
            return None
        shared = self.problem.stages[op.stage].count > 1 and (root, op.stage) in self.outer
        return None if shared else op.stage

    def _saving_stages(self) -> dict[TensorRef, set[int]]:
        found: dict[TensorRef, set[int]] = {}
        for op in self.problem.ops:
            inputs, outputs, _ = self.memory.saved(op.node)
            refs = [self.memory.inputs[op.node][j] for j in inputs] + [TensorRef(op.node, j) for j in outputs]
            for ref in refs:
                found.setdefault(self.memory.roots.get(ref, ref), set()).add(op.stage)
        return found

    def _own_copy(self, stage: int, size: int, savers: list[Saver]) -> None:
        """A storage that each block of a stage keeps for itself."""
        target = self.stages[stage]
        if len(savers) == 1:
            [saver] = savers
            for i in saver.choices:
                keep(target.block, saver.op, self.model.x[saver.op][i], size)
                for held, left_out in self._held(stage):
                    for variable, coefficient in self._kept(saver.op, i, left_out).items():
                        add(held, variable, coefficient * size)
            return
        before: int | None = None
        for saver in sorted(savers, key=lambda saver: saver.op):
            one = self.program.variable("saved")  # whether this op or one before it keeps the storage
            uses = [(self.model.x[saver.op][i], -1.0) for i in saver.choices]
            self.program.at_least("saved", [(one, 1.0), *uses], 0.0)
            keep(target.block, saver.op, one, size)
            if before is not None:
                self.program.at_least("saved", [(one, 1.0), (before, -1.0)], 0.0)
                keep(target.block, saver.op, before, -size)
            before = one
        for held, left_out in self._held(stage):
            many = self.program.variable("kept", upper=None)
            add(held, many, size)
            for saver in savers:
                keeps = [pair for i in saver.choices for pair in self._kept(saver.op, i, left_out).items()]
                self.program.at_least("kept", [(many, 1.0)] + [(v, -c) for v, c in keeps], 0.0)

    def _shared_copy(self, size: int, savers: list[Saver]) -> None:
        """A storage that several stages, or all blocks of one, keep once; it counts from the first of them on."""
        first = min(self.problem.ops[saver.op].stage for saver in savers)
        many = self.program.variable("kept")
        for held, _ in self._held(first):
            add(held, many, size)
        before: dict[int, int] = {}  # by stage
        for saver in sorted(savers, key=lambda saver: saver.op):
            stage = self.problem.ops[saver.op].stage
            uses = [(self.model.x[saver.op][i], -1.0) for i in saver.choices]
            if stage in self.model.recomputed:
                self.program.at_least("kept", [(many, 1.0), (self.model.kept(stage), -1.0), *uses], -1.0)
            else:
                self.program.at_least("kept", [(many, 1.0), *uses], 0.0)
            if stage == first or stage in self.model.recomputed:
                one = self.program.variable("saved")
                there = [(many, 1.0)] if stage != first else []  # since a stage before, which does not recompute
                self.program.at_least("saved", [(one, 1.0), *there, *uses], 0.0)
                keep(self.stages[stage].block, saver.op, one, size)
                if stage in before:
                    self.program.at_least("saved", [(one, 1.0), (before[stage], -1.0)], 0.0)
                    keep(self.stages[stage].block, saver.op, before[stage], -size)
                before[stage] = one
