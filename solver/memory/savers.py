"""Which ops keep which storage for backward: for one block of a stage, or for several blocks or stages at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.cost.memory.formulas import Copy
from autopar.graph import TensorRef
from autopar.layout import Layout
from autopar.solver.problem import Op, Problem

Savers = dict[tuple[int, int, int], "Saver"]  # by op, `start` and `end`


@dataclass
class Saver:
    """An op that keeps a copy of a storage under some of its `choices` (their numbers), in blocks of the levels of
    recompute from `start` up to, but not including, `end` (0: at all levels from `start`)."""

    op: int
    start: int
    end: int
    choices: list[int] = field(default_factory=list)

    def outlasts(self, end: int) -> bool:
        """Whether it keeps the copy at all levels below `end`, at which another saver ends (0: at no level)."""
        return not self.start and (not self.end or 0 < end <= self.end)


class Copies:
    """The copies that a problem's ops keep, with their savers.

    `own`: copies of which each block of a stage has one. `read`: the copy that the first of several blocks reads from
    outside, paired with the one that each later block reads from the block before in its place. `shared`: copies that
    several stages, or all blocks of one, keep once.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.memory = problem, problem.memory
        self.nodes = list(problem.memory.graph.nodes)
        self.own: dict[tuple[int, Copy], Savers] = {}
        self.read: dict[tuple[int, Copy, Copy], Savers] = {}
        self.shared: dict[Copy, Savers] = {}
        self._by_later: dict[tuple[int, Copy], list[Savers]] = {}
        stages: dict[TensorRef, set[int]] = {}  # by storage that no block of several has for itself
        for _, op, ref, later, *_ in self._kept():
            if later is None:
                stages.setdefault(self.memory.roots[ref], set()).add(op.stage)
        for number, op, ref, later, layouts, start, end in self._kept():
            for i, layout in enumerate(layouts):
                copy, next_ = self.memory.copy(ref, layout), self.memory.copy(later or ref, layout)
                if not self.memory.copy_bytes(copy) and not self.memory.copy_bytes(next_):
                    continue
                if later is not None and self._is_of(later, op, 1):
                    savers = self.own.setdefault((op.stage, copy), {})
                elif later is not None:
                    savers = self.read.setdefault((op.stage, copy, next_), {})
                elif len(stages[copy[0]]) > 1 or self.problem.stages[op.stage].count > 1:
                    savers = self.shared.setdefault(copy, {})
                else:
                    savers = self.own.setdefault((op.stage, copy), {})
                saver = savers.setdefault((number, start, end), Saver(number, start, end))
                if i not in saver.choices:
                    saver.choices.append(i)
        for (at, _, its), savers in self.read.items():
            self._by_later.setdefault((at, its), []).append(savers)

    def of_next(self, stage: int, copy: Copy) -> list[Saver]:
        """The savers, in the next block, of a copy that each block of a stage makes."""
        return [saver for savers in self._by_later.get((stage, copy), ()) for saver in savers.values()]

    def before(self, stage: int, copy: Copy) -> list[Saver]:
        """The savers, in stages before, of a copy that a stage's first block reads."""
        savers = [*self.makers(copy), *self.shared.get(copy, {}).values()]
        return [saver for saver in savers if self.problem.ops[saver.op].stage < stage]

    def makers(self, copy: Copy) -> list[Saver]:
        """The savers of a copy in the block that makes it, if that is a single block or the last of equal ones."""
        its = self.problem.first_of_last(copy[0])
        root = copy[0] if its is None else its
        maker = self.problem.op_of.get(root.node)
        if maker is None:
            return []
        at = self.problem.ops[maker].stage
        alone = its is not None or self.problem.stages[at].count == 1
        return list(self.own.get((at, (root, copy[1])), {}).values()) if alone else []

    def _kept(self) -> Iterator[tuple[int, Op, TensorRef, TensorRef | None, list[Layout], int, int]]:
        """What ops keep: the op's number and the op; the tensor; the second block's tensor in its place, where each of
        several blocks has its own; the tensor's layouts by choice; and the levels `start` and `end`."""
        for number, op in enumerate(self.problem.ops):
            for ref, is_input, j, start, end in self._tensors(number):
                layouts = [(c.strategy.inputs if is_input else c.strategy.outputs)[j] for c in op.choices]
                yield number, op, ref, self._later(op, ref, is_input, j), layouts, start, end

    def _tensors(self, number: int) -> Iterator[tuple[TensorRef, bool, int, int, int]]:
        """What an op keeps: the tensor, whether it is an input, its place, and the levels `start` and `end`."""
        op = self.problem.ops[number]
        inputs, outputs, _ = self.memory.saved(op.node)
        dropped, depth = op.again.dropped, self.problem.stages[op.stage].depth
        for j, ref in enumerate(self.memory.inputs[op.node]):
            if self.memory.is_parameter(ref.node):
                continue
            until = self.problem.together(ref, number) if dropped else 0
            if j in inputs:
                yield ref, True, j, 0, until
            elif 0 < dropped < depth and dropped < until:
                yield ref, True, j, dropped, until
        for j in outputs:
            yield TensorRef(op.node, j), False, j, 0, dropped

    def _later(self, op: Op, ref: TensorRef, is_input: bool, j: int) -> TensorRef | None:
        """The tensor that the second block's op keeps in place of one that the first block's op keeps; None if it is of
        the same storage, or if there is no second block."""
        stage = self.problem.stages[op.stage]
        if stage.count == 1 or stage.repeat is None:
            return None
        node = self.nodes[self.memory.lifetimes.position[op.node] + stage.repeat.period]
        later = self.memory.inputs[node][j] if is_input else TensorRef(node, j)
        same = self.memory.roots[later] == self.memory.roots[ref]
        return later if not same and (self._is_of(later, op, 0) or self._is_of(later, op, 1)) else None

    def _is_of(self, ref: TensorRef, op: Op, block: int) -> bool:
        """Whether a tensor's storage is made in a block of an op's stage; `block` counts from the stage's first."""
        stage = self.problem.stages[op.stage]
        assert stage.repeat is not None
        position = self.memory.lifetimes.position[self.memory.roots[ref].node]
        return position in stage.repeat.instance(stage.first + block)
