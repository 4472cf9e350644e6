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

from autopar.cost.memory import Copy
from autopar.graph import TensorRef
from autopar.solver.model import Model
from autopar.solver.replays import Expression
from autopar.solver.savers import Copies, Saver
from autopar.solver.stage_bytes import Part, StageBytes, add, keep


class Saved:
    """Adds what the ops of a model keep to its stages."""

    def __init__(self, model: Model, stages: list[StageBytes]) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory, self.stages = model.problem.memory, stages
        self._internal()
        self._copies()

    def _held(self, stage: int) -> list[tuple[Expression, int, int]]:
        """Where bytes that blocks keep are counted: from which level on, and how many of its last blocks do not count,
        fewest first."""
        data, many = self.stages[stage], self.problem.stages[stage].count
        found = [(data.held, 0, 0)]
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

    def _copies(self) -> None:
        """Saved tensors: one copy per storage and axes, however many ops keep it."""
        copies = Copies(self.problem)
        for (stage, copy), found in copies.own.items():
            savers, size = list(found.values()), self.memory.copy_bytes(copy)
            ends = {saver.end for saver in savers}
            end = 0 if 0 in ends else max(ends)
            readers = [saver for saver in copies.of_next(stage, copy) if saver.outlasts(end)]
            if readers:
                self._brought(stage, size, savers, readers, end)
            self._own_copy(stage, copy[0], size, savers, readers)
            if self.problem.stages[stage].repeat is None and self.problem.first_of_last(copy[0]) is not None:
                self._handed(stage, size, savers, copies.own_of(copy))
        for (stage, first, later), found in copies.read.items():
            savers, size = list(found.values()), self.memory.copy_bytes(first)
            self._own_copy(stage, first[0], max(size, self.memory.copy_bytes(later)), savers, [])
            self._handed_first(stage, size, savers, copies.before(stage, first))
        for copy, found in copies.shared.items():
            self._shared_copy(self.memory.copy_bytes(copy), list(found.values()))

    def _uses(self, saver: Saver) -> Expression:
        """Whether an op keeps a copy where it is not recomputed."""
        return dict.fromkeys((self.model.x[saver.op][i] for i in saver.choices), 1.0)

    def _own_copy(self, stage: int, root: TensorRef, size: int, savers: list[Saver], readers: Sequence[Saver]) -> None:
        """A storage that each block of a stage keeps for itself; `readers` keep it in the block behind it."""
        data = self.stages[stage]
        savers.sort(key=lambda saver: saver.op)
        always = [saver for saver in savers if not saver.start]  # what is not recomputed keeps it
        before: Expression = {}
        for saver in always:
            uses = self._uses(saver)
            one = uses
            if len({saver.op for saver in always}) > 1:  # whether this op or one before it keeps the storage
                one = {self.program.variable("saved"): 1.0}
                self._largest("saved", one, [uses, before])
            for variable, coefficient in one.items():
                keep(data.block, saver.op, variable, coefficient * size)
            for variable, coefficient in before.items():
                keep(data.block, saver.op, variable, -coefficient * size)
            before = one
        self._in_segments(stage, root, size, savers, before)
        borders = sorted({border for saver in savers for border in (saver.start, saver.end)})
        for start, end in itertools.pairwise(borders) if len(borders) > 1 else [(0, 0)]:
            there = [Saver(s.op, start, end, s.choices) for s in savers if s.start <= start and s.end >= end]
            if readers and there:
                self._held_with_next(stage, size, there, readers)
            else:
                self._held_copy(stage, size, there)

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
            each = [terms for saver in savers if (terms := self._all_kept(saver, level, left_out))]
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

    def _all_kept(self, saver: Saver, level: int, left_out: int) -> Expression:
        """`_kept` under all choices of a saver."""
        found: Expression = {}
        for i in saver.choices:
            for variable, coefficient in self._kept(saver, i, level, left_out).items():
                add(found, variable, coefficient)
        return found

    def _held_with_next(self, stage: int, size: int, savers: list[Saver], readers: Sequence[Saver]) -> None:
        """What blocks make and keep between the same levels, beside what the next ones keep of it: nothing where they
        do, but what the last block of all has."""
        for held, level, left_out in self._held(stage):
            each = [terms for saver in savers if (terms := self._all_kept(saver, level, left_out))]
            if not each:
                continue
            many = self.program.variable("kept", upper=None)
            add(held, many, size)
            theirs = [self._all_kept(reader, level, 0) for reader in readers]
            for terms in each:
                row = [(v, -c) for v, c in terms.items()] + [(v, c) for one in theirs for v, c in one.items()]
                self.program.at_least("kept", [(many, 1.0), *row], 0.0)
            for saver in [] if left_out else savers:
                self._of_last_block(stage, many, saver)
        alone = self.program.variable("alone")  # that it counts here, of the least that a block keeps
        self.program.at_most("alone", [(alone, 1.0), *((v, -1.0) for v in self._uses(savers[0]))], 0.0)
        for reader in readers:
            self.program.at_most("alone", [(alone, 1.0), *self._uses(reader).items()], 1.0)
        for target in self.stages[stage].least[savers[0].start : savers[0].end or None]:
            add(target, alone, size)

    def _of_last_block(self, stage: int, many: int, saver: Saver) -> None:
        """A count is at least 1 where the last of several blocks keeps what an op saves."""
        terms, right = [(many, 1.0), *((v, -1.0) for v in self._uses(saver))], 0.0
        if saver.end:
            terms, right = [*terms, (self.model.kept(stage, saver.end), -1.0)], right - 1.0
        if saver.start:
            r, count = self.model.recomputed[stage][saver.start - 1], self.problem.stages[stage].count
            terms, right = [*terms, (r, -1.0)], right - count
        self.program.at_least("last", terms, right)

    def _brought(self, stage: int, size: int, savers: Sequence[Saver], readers: Sequence[Saver], end: int) -> None:
        """What the block before keeps counts in the next one only, where that keeps it too: until its first op that
        does, beside it."""
        data, both = self.stages[stage], {self.program.variable("both"): 1.0}
        data.brought_until = max(data.brought_until, end or len(data.least))
        for saver in savers:
            for reader in readers:
                uses = [(v, -c) for one in (saver, reader) for v, c in self._uses(one).items()]
                self.program.at_least("both", [*both.items(), *uses], -1.0)
        here, before = -1, both
        for variable in both:
            keep(data.brought, here, variable, size)
        ops = sorted({reader.op for reader in readers})
        for number in ops:
            rest: Expression = {}
            if number != ops[-1]:
                rest = {self.program.variable("rest"): 1.0}
                kept = [self._uses(reader) for reader in readers if reader.op <= number]
                terms = [(v, c) for uses in kept for v, c in uses.items()]
                self.program.at_least("rest", [*rest.items(), *((v, -c) for v, c in both.items()), *terms], 0.0)
            for some, sign in ((rest, 1.0), (before, -1.0)):
                for variable in some:
                    keep(data.brought, number, variable, sign * size)
            before = rest

    def _handed(self, stage: int, size: int, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """What the last of equal blocks keeps already counts no more where ops behind them keep it too."""
        one = self._kept_before(savers, makers)
        if one is not None:
            keep(self.stages[stage].block, max(saver.op for saver in savers), one, -size)
            for held, *_ in self._held(stage):
                add(held, one, -size)

    def _handed_first(self, stage: int, size: int, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """What the first of equal blocks keeps of others counts no more, behind it, where ops before keep it already."""
        savers = [saver for saver in savers if not saver.start]
        one = self._kept_before(savers, makers) if savers else None
        if one is None:
            return
        for end in {saver.end for saver in savers} - {0}:  # it is not recomputed
            self.program.at_most("handed", [(one, 1.0), (self.model.any_recomputed[stage][end - 1], 1.0)], 1.0)
        for held, level, _ in self._held(stage):
            if not level:
                add(held, one, -size)

    def _kept_before(self, savers: Sequence[Saver], makers: Sequence[Saver]) -> int | None:
        """A variable that is 0 but where some op keeps a storage that the one which made it keeps already."""
        makers = [saver for saver in makers if not saver.start]
        if not makers:
            return None
        one = self._some(savers)
        uses = [(v, -1.0) for saver in makers for v in self._uses(saver)]
        self.program.at_most("handed", [(one, 1.0), *uses], 0.0)
        for maker in makers:
            if maker.end:  # the last block is at no level that drops it
                at = self.problem.ops[maker.op].stage
                r, many = self.model.recomputed[at][maker.end - 1], float(self.problem.stages[at].count)
                self.program.at_most("handed", [(one, 1.0), (r, 1.0)], many)
        return one

    def _some(self, savers: Sequence[Saver]) -> int:
        """A variable that is at most 1, and 0 where none of these ops keeps a storage."""
        one = self.program.variable("some")
        uses = [(v, -1.0) for saver in savers for v in self._uses(saver)]
        self.program.at_most("some", [(one, 1.0), *uses], 0.0)
        return one

    def _in_segments(
        self, stage: int, root: TensorRef, size: int, savers: Sequence[Saver], kept: Expression
    ) -> None:
        """What inner segments free of a storage, of which `kept` tells if a block keeps it; what they keep besides."""
        data, lifetimes = self.stages[stage], self.memory.lifetimes
        levels, repeat = self.problem.stages[stage].levels, self.problem.stages[stage].repeat
        if levels is None or repeat is None:
            return
        start = repeat.start + self.problem.stages[stage].first * repeat.period
        for level in range(1, len(levels)):
            for first, last in levels.spans(level):
                if kept and lifetimes.stays_within(root, start + first, start + last):
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
                self._largest("besides", one, [{**self._uses(s), **earlier} for s in reads])
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
