"""What backward needs, in bytes by stage: saved tensors as copies, statistics and masks.

A copy is a storage and the axes that cut it (`autopar.cost.memory`). Of a storage that several ops keep in one layout
there is one copy::

    s_v >= sum of x[v,.] that keep it, s_v >= s_u         one block as far as op v, of those that keep it; u before v
    k >= sum of (z_from - z_until)[v,.], for each op v    all blocks, after forward; z_0 = m x

An op keeps what it saves until the level at which a segment makes that again; from its own level on, also what it reads
from outside its segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost.memory import Copy
from autopar.graph import TensorRef
from autopar.solver.model import Model
from autopar.solver.problem import Op
from autopar.solver.replays import Expression
from autopar.solver.stage_bytes import Part, StageBytes, add, keep


@dataclass
class Saver:
    """An op that keeps a copy of a storage under some of its choices (their numbers), in blocks from one level of
    recompute on until another."""

    op: int
    start: int
    end: int
    choices: list[int] = field(default_factory=list)


class Saved:
    """Adds what the ops of a model keep to its stages."""

    def __init__(self, model: Model, stages: list[StageBytes]) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory, self.stages = model.problem.memory, stages
        self.stages_of = self._saving_stages()
        self.outer = {
            (self.memory.roots[self.problem.ref(t)], t.stage) for t in self.problem.tensors if t.kind == "outer"
        }
        self._internal()
        self._copies()

    def _held(self, stage: int) -> list[tuple[Expression, int, int]]:
        """Where bytes that blocks keep are counted: from which level on, and how many of its last blocks do not count,
        fewest first."""
        data, many = self.stages[stage], self.problem.stages[stage].count
        found = [(target, level, 0) for level, target in enumerate(data.held)]
        found += [(target, level, 1) for level, target in enumerate(data.held_but_one) if many > 1]
        return [*found, (data.held_but_two, 0, 2)] if many > 2 else found

    def _kept(self, saver: Saver, choice: int, level: int, left_out: int) -> Expression:
        """In how many blocks of at least a level, so many of the last of that level left out, a choice's op keeps."""
        op, start = self.problem.ops[saver.op], max(saver.start, level)
        variable = self.model.x[saver.op][choice]
        if saver.end and start >= saver.end:
            return {}
        found: Expression = {}
        if start:
            found[int(self.model.z(saver.op, start)[choice])] = 1.0
        else:
            found[variable] = float(self.model.count(op))
        if saver.end:
            found[int(self.model.z(saver.op, saver.end)[choice])] = -1.0
        if saver.start <= level:
            add(found, variable, -float(left_out))
        return found

    def _parts(self, number: int) -> Iterator[Part]:
        """The inner segments that hold an op."""
        op = self.problem.ops[number]
        levels = self.problem.stages[op.stage].levels
        if levels is None or not op.again.dropped:
            return
        for level in range(op.again.dropped, len(levels)):
            span = levels.holding(op.again.offset, level)
            assert span is not None
            yield level, span

    def _internal(self) -> None:
        for number, op in enumerate(self.problem.ops):
            internal = self.memory.saved(op.node)[2]
            if not internal:
                continue
            saver, data = Saver(number, 0, op.again.dropped), self.stages[op.stage]
            for i, choice in enumerate(op.choices):
                size = round(internal * choice.strategy.work)
                keep(data.block, number, self.model.x[number][i], size)
                for part in self._parts(number):
                    add(data.freed.setdefault(part, {}), self.model.x[number][i], size)
                for target, level, left_out in self._held(op.stage):
                    for variable, coefficient in self._kept(saver, i, level, left_out).items():
                        add(target, variable, coefficient * size)
                for target in data.least[: op.again.dropped or None]:
                    add(target, self.model.x[number][i], size)

    def _tensors(self, number: int) -> Iterator[tuple[TensorRef, bool, int, int, int]]:
        """What an op keeps: the tensor, whether it is an input, its place, and between which levels."""
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

    def _copies(self) -> None:
        """Saved tensors: one copy per storage and axes, however many ops keep it."""
        own: dict[tuple[int, Copy], dict[tuple[int, int, int], Saver]] = {}
        shared: dict[Copy, dict[tuple[int, int, int], Saver]] = {}
        for number, op in enumerate(self.problem.ops):
            for ref, is_input, j, start, end in self._tensors(number):
                for i, choice in enumerate(op.choices):
                    copy = self.memory.copy(ref, (choice.strategy.inputs if is_input else choice.strategy.outputs)[j])
                    if self.memory.copy_bytes(copy):
                        alone = self._owner(copy[0], op) == op.stage
                        savers = own.setdefault((op.stage, copy), {}) if alone else shared.setdefault(copy, {})
                        saver = savers.setdefault((number, start, end), Saver(number, start, end))
                        if i not in saver.choices:
                            saver.choices.append(i)
        for (stage, copy), savers in own.items():
            self._own_copy(stage, copy, list(savers.values()))
            its = self.problem.first_of_last(copy[0]) if self.problem.stages[stage].repeat is None else None
            if its is not None:
                at = self.problem.ops[self.problem.op_of[its.node]].stage
                self._handed(stage, copy, list(savers.values()), list(own.get((at, (its, copy[1])), {}).values()))
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
        for number, op in enumerate(self.problem.ops):
            for ref, *_ in self._tensors(number):
                found.setdefault(self.memory.roots[ref], set()).add(op.stage)
        return found

    def _own_copy(self, stage: int, copy: Copy, savers: list[Saver]) -> None:
        """A storage that each block of a stage keeps for itself."""
        size, data = self.memory.copy_bytes(copy), self.stages[stage]
        savers.sort(key=lambda saver: saver.op)
        always = [saver for saver in savers if not saver.start]  # what is not recomputed keeps it
        before: Expression = {}
        for saver in always:
            uses = dict.fromkeys((self.model.x[saver.op][i] for i in saver.choices), 1.0)
            one = uses
            if len({saver.op for saver in always}) > 1:  # whether this op or one before it keeps the storage
                one = {self.program.variable("saved"): 1.0}
                self._largest("saved", one, [uses, before])
            for variable, coefficient in one.items():
                keep(data.block, saver.op, variable, coefficient * size)
            for variable, coefficient in before.items():
                keep(data.block, saver.op, variable, -coefficient * size)
            before = one
        self._in_segments(stage, copy, savers, before)
        borders = sorted({border for saver in savers for border in (saver.start, saver.end)})
        for start, end in itertools.pairwise(borders) if len(borders) > 1 else [(0, 0)]:
            there = [s for s in savers if s.start <= start and s.end >= end]
            self._held_copy(stage, size, [Saver(s.op, start, end, s.choices) for s in there])

    def _held_copy(self, stage: int, size: int, savers: list[Saver]) -> None:
        """A storage that some ops keep between the same levels.

        A variable that counts such blocks may be larger than they are, and so is nothing to subtract: all but two are
        all but one, less one where some op keeps it.
        """
        but_one: Expression = {}
        for saver in savers[:1]:  # where this one keeps it, a block does
            for target in self.stages[stage].least[saver.start : saver.end or None]:
                for i in saver.choices:
                    add(target, self.model.x[saver.op][i], size)
        for held, level, left_out in self._held(stage) if savers else ():
            each: list[Expression] = []
            for saver in savers:
                terms: Expression = {}
                for i in saver.choices:
                    for variable, coefficient in self._kept(saver, i, level, left_out).items():
                        add(terms, variable, coefficient)
                each.append(terms)
            each = [terms for terms in each if terms]
            if len(each) > 1 and left_out == 2:
                each = [but_one if savers[0].start else {**but_one, self._some(savers): -1.0}]
            elif len(each) > 1:
                many = {self.program.variable("kept", upper=None): 1.0}
                self._largest("kept", many, each)
                each = [many]
            if (level, left_out) == (0, 1) and each:
                but_one = each[0]
            for variable, coefficient in each[0].items() if each else ():
                add(held, variable, coefficient * size)

    def _handed(self, stage: int, copy: Copy, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """What the last of equal blocks keeps already counts no more where ops behind them keep it too."""
        makers = [saver for saver in makers if not saver.start]
        if not makers:
            return
        one, size = self._some(savers), self.memory.copy_bytes(copy)
        uses = [(self.model.x[saver.op][i], -1.0) for saver in makers for i in saver.choices]
        self.program.at_most("handed", [(one, 1.0), *uses], 0.0)
        for maker in makers:
            if maker.end:  # the last block is at no level that drops it
                at = self.problem.ops[maker.op].stage
                r, many = self.model.recomputed[at][maker.end - 1], float(self.problem.stages[at].count)
                self.program.at_most("handed", [(one, 1.0), (r, 1.0)], many)
        keep(self.stages[stage].block, max(saver.op for saver in savers), one, -size)
        for held, *_ in self._held(stage):
            add(held, one, -size)

    def _some(self, savers: Sequence[Saver]) -> int:
        """A variable that is at most 1, and 0 where none of these ops keeps a storage."""
        one = self.program.variable("some")
        uses = [(self.model.x[saver.op][i], -1.0) for saver in savers for i in saver.choices]
        self.program.at_most("some", [(one, 1.0), *uses], 0.0)
        return one

    def _in_segments(self, stage: int, copy: Copy, savers: Sequence[Saver], kept: Expression) -> None:
        """What inner segments free of a storage, of which `kept` tells if a block keeps it; what they keep besides."""
        data, size, lifetimes = self.stages[stage], self.memory.copy_bytes(copy), self.memory.lifetimes
        levels, repeat = self.problem.stages[stage].levels, self.problem.stages[stage].repeat
        if levels is None or repeat is None:
            return
        start = repeat.start + self.problem.stages[stage].first * repeat.period
        for level in range(1, len(levels)):
            for first, last in levels.spans(level):
                if kept and lifetimes.stays_within(copy[0], start + first, start + last):
                    for variable, coefficient in kept.items():
                        add(data.freed.setdefault((level, (first, last)), {}), variable, coefficient * size)
                offsets = [(saver, self.problem.ops[saver.op].again.offset) for saver in savers]
                reads = [s for s, at in offsets if s.start and s.start <= level < s.end and first <= at <= last]
                if not reads:
                    continue
                earlier = {
                    self.model.x[s.op][i]: -1.0 for s, at in offsets if not s.start and at < first for i in s.choices
                }
                one = {self.program.variable("besides"): 1.0}
                uses = [dict.fromkeys((self.model.x[s.op][i] for i in s.choices), 1.0) for s in reads]
                self._largest("besides", one, [{**terms, **earlier} for terms in uses])
                for variable in one:
                    add(data.besides.setdefault((level, (first, last)), {}), variable, size)

    def _largest(self, name: str, one: Expression, least: Sequence[Expression]) -> None:
        """A variable is at least each of some expressions."""
        for terms in least:
            if terms:
                self.program.at_least(name, [*one.items(), *((v, -c) for v, c in terms.items())], 0.0)

    def _shared_copy(self, size: int, savers: list[Saver]) -> None:
        """A storage that several stages, or all blocks of one, keep once; it counts from the first of them on."""
        first = min(self.problem.ops[saver.op].stage for saver in savers)
        many = self.program.variable("kept")
        for held, *_ in self._held(first):
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
