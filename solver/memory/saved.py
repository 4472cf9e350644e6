"""Bytes kept for backward by stage: saved tensors as copies, and the statistics and masks of ops.

A copy is a storage and the axes that cut it (`cost.memory.formulas`); several ops that keep a storage in one layout
share one copy. x[v] is the sum of the choices of op v that keep the copy; z_l[v] is the same summed over all blocks
recomputed at level l or a higher one (z_0 = m x in m blocks); and the op keeps it in blocks of the levels from `start`
up to, but not including, `end`. The fields of `StageBytes` get these variables::

    block.by_op       s_v >= x[v], s_v >= s_u            one block up to op v; u: the op before v that keeps it
    kept.all_blocks   k >= (z_start - z_end)[v]          all blocks after forward, for each v
    kept.but_last     k >= (z_start - z_end)[v] - x[v]   all blocks but the last, for each v; without - x[v] where
                                                         `start` is above the level: the last may not keep it
    block.besides     b >= x[v] - sum of x[u]            an inner segment: what its op v reads, and no op u before the
                                                         segment keeps in any case

An op keeps a saved tensor at all levels below the one at which a segment holds both the op and the tensor's maker, and
so makes it again. From the level at which the op is in a segment at all, the segment keeps what it reads from outside.
In a block that may be recomputed, such an `end` is at the latest the level of the whole block, whose inputs count by
themselves; in other blocks `end` is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.cost.memory.local_workspace import kept_bytes
from autopar.cost.traffic import in_segment
from autopar.graph import TensorRef, is_cast_input
from autopar.solver.memory.neighbours import Neighbours
from autopar.solver.memory.savers import Copies, Saver
from autopar.solver.memory.stage_bytes import Part, StageBytes, add, keep, total
from autopar.solver.model import Model
from autopar.solver.problem import Tensor
from autopar.solver.seconds.counts import Counts
from autopar.solver.seconds.replays import Expression, counted


class Saved:
    """Adds what the ops of a model keep for backward to its stages."""

    def __init__(self, model: Model, stages: list[StageBytes]) -> None:
        self.model, self.program, self.problem = model, model.program, model.problem
        self.memory, self.stages = model.problem.memory, stages
        self.counts = Counts(model, stages)
        self.neighbours = Neighbours(self.counts)
        self.copies = Copies(self.problem)
        self._statistics()
        self._every_copy()
        for tensor in self._from_outside():
            self._input_of_recomputed_blocks(tensor)

    def _inner_segments(self, number: int) -> Iterator[Part]:
        """The inner segments that contain an op, with their levels."""
        op = self.problem.ops[number]
        levels = self.problem.stages[op.stage].levels
        if levels is None or not op.again.dropped:
            return
        for level in range(op.again.dropped, len(levels)):
            span = levels.holding(op.again.offset, level)
            assert span is not None
            yield level, span

    def _statistics(self) -> None:
        """Add what ops keep beside their inputs and outputs: statistics and masks, which no two ops share."""
        for number, op in enumerate(self.problem.ops):
            internal = self.memory.saved(op.node)[2]
            if not internal:
                continue
            saver, stage_bytes = Saver(number, 0, op.again.dropped), self.stages[op.stage]
            for i, choice in enumerate(op.choices):
                size = kept_bytes(op.node, choice.strategy, self.memory.mesh_shape, internal)
                keep(stage_bytes.block.by_op, number, self.model.x[number][i], size)
                for part in self._inner_segments(number):
                    add(stage_bytes.block.freed.setdefault(part, {}), self.model.x[number][i], size)
                for target, level, left_out in self.counts.targets(op.stage):
                    for variable, coefficient in self.counts.of_choice(saver, i, level, left_out).items():
                        add(target, variable, coefficient * size)
                for target in stage_bytes.kept.least_by_level[: op.again.dropped or None]:
                    add(target, self.model.x[number][i], size)

    def _every_copy(self) -> None:
        """Add the saved tensors: one copy per storage and axes, however many ops keep it."""
        copies, neighbours = self.copies, self.neighbours
        for (stage, copy), by_op in copies.own.items():
            savers, size = list(by_op.values()), self.memory.copy_bytes(copy)
            self._copy_of_each_block(stage, copy[0], size, savers, behind=copies.of_next(stage, copy))
            if self.problem.stages[stage].repeat is None and self.problem.first_of_last(copy[0]) is not None:
                neighbours.behind(stage, size, savers, copies.makers(copy))
        for (stage, first, later), by_op in copies.read.items():
            savers, size = list(by_op.values()), self.memory.copy_bytes(first)
            makers = copies.before(stage, first)
            largest = max(size, self.memory.copy_bytes(later))
            self._copy_of_each_block(stage, first[0], largest, savers, before=makers)
            neighbours.before(stage, size, savers, makers)
        for copy, by_op in copies.shared.items():
            self._copy_of_several_stages(self.memory.copy_bytes(copy), list(by_op.values()))

    def _copy_of_each_block(
        self,
        stage: int,
        root: TensorRef,
        size: int,
        savers: list[Saver],
        behind: Sequence[Saver] = (),
        before: Sequence[Saver] = (),
    ) -> None:
        """Add a storage of which each block of a stage keeps its own. `behind`: ops of the next block that keep it too;
        `before`: ops of earlier stages that keep the first block's."""
        savers.sort(key=lambda saver: saver.op)
        readers = self.neighbours.brought(stage, size, savers, behind)
        whole = self._in_one_block(stage, size, [saver for saver in savers if not saver.start])
        self._freed(stage, root, size, whole)
        self._besides(stage, size, savers)
        # Borders are the levels at which an op begins or ends to keep it: between two neighbours, the same ops keep it.
        borders = sorted({border for saver in savers for border in (saver.start, saver.end)})
        for start, end in itertools.pairwise(borders) if len(borders) > 1 else [(0, 0)]:
            keepers = [Saver(s.op, start, end, s.choices) for s in savers if s.start <= start and s.end >= end]
            self._least_of_a_block(stage, size, keepers[:1], [*behind, *before])
            if readers:
                self.neighbours.beyond_readers(stage, size, keepers, readers)
            else:
                self._in_all_blocks(stage, size, keepers)

    def _in_one_block(self, stage: int, size: int, savers: Sequence[Saver]) -> Expression:
        """s_v >= x[v], s_v >= s_u: whether op v, or one before it, keeps a storage in a block that is not recomputed.

        Returns s of the last op: whether the block keeps the storage. A single op needs no variable: s_v is x[v].
        """
        block, several = self.stages[stage].block.by_op, len({saver.op for saver in savers}) > 1
        before_v: Expression = {}  # s_u
        for saver in savers:
            uses = self.counts.uses(saver)
            kept_by_now = uses
            if several:
                kept_by_now = {self.program.variable("saved"): 1.0}
                self.counts.largest("saved", kept_by_now, [uses, before_v])
            for variable, coefficient in kept_by_now.items():  # `block` has what each op adds: s_v - s_u
                keep(block, saver.op, variable, coefficient * size)
            for variable, coefficient in before_v.items():
                keep(block, saver.op, variable, -coefficient * size)
            before_v = kept_by_now
        return before_v

    def _least_of_a_block(self, stage: int, size: int, savers: Sequence[Saver], others: Sequence[Saver]) -> None:
        """Add a storage to the least that a block keeps: where this op keeps it and no op outside the block (`others`).

        Being a bound from below, it may be made from one of the block's ops that keep it, which takes no variable.
        """
        for saver in savers:
            uses = self.counts.uses(saver)
            if others:
                alone = self.program.variable("alone")
                self.program.at_most("alone", [(alone, 1.0), *((v, -1.0) for v in uses)], 0.0)
                for other in others:
                    self.program.at_most("alone", [(alone, 1.0), *self.counts.uses(other).items()], 1.0)
                uses = {alone: 1.0}
            for target in self.stages[stage].kept.least_by_level[saver.start : saver.end or None]:
                for variable in uses:
                    add(target, variable, size)

    def _in_all_blocks(self, stage: int, size: int, savers: list[Saver]) -> None:
        """Add a storage that some ops keep between the same levels to what all blocks keep.

        A variable that counts blocks may exceed their number, so none may be subtracted: the count of all blocks but
        two is that of all but one, less 1 where some op keeps the storage.
        """
        all_but_last: Expression = {}  # the count of all blocks but the last, of any level
        for target, level, left_out in self.counts.targets(stage) if savers else ():
            counts = [terms for saver in savers if (terms := self.counts.of(saver, level, left_out))]
            if len(counts) > 1 and left_out == 2:
                # where it is kept only from a level on, the last blocks may be below that level: subtract nothing
                counts = [all_but_last if savers[0].start else {**all_but_last, self.counts.any_keeps(savers): -1.0}]
            elif len(counts) > 1:
                blocks = {self.program.variable("kept", lower=self.counts.least(level, left_out), upper=None): 1.0}
                self.counts.largest("kept", blocks, counts)
                counts = [blocks]
            if (level, left_out) == (0, 1) and counts:
                all_but_last = counts[0]
            for variable, coefficient in counts[0].items() if counts else ():
                add(target, variable, coefficient * size)

    def _spans(self, stage: int) -> Iterator[Part]:
        """The inner segments of a stage's block, by level."""
        levels = self.problem.stages[stage].levels
        if levels is not None:
            yield from ((level, span) for level in range(1, len(levels)) for span in levels.spans(level))

    def _freed(self, stage: int, root: TensorRef, size: int, whole: Expression) -> None:
        """A storage that is made and read within an inner segment is freed by it; `whole`: 1 if a block keeps it."""
        own = self.problem.stages[stage]
        if own.repeat is None or not whole:
            return
        start = own.repeat.start + own.first * own.repeat.period
        for level, (first, last) in self._spans(stage):
            if self.memory.lifetimes.stays_within(root, start + first, start + last):
                freed = self.stages[stage].block.freed.setdefault((level, (first, last)), {})
                for variable, coefficient in whole.items():
                    add(freed, variable, coefficient * size)

    def _besides(self, stage: int, size: int, savers: Sequence[Saver]) -> None:
        """b >= x[v] - sum of x[u]: an inner segment keeps what its op v reads and no op u before the segment keeps."""
        if self.problem.stages[stage].repeat is None:
            return
        offsets = [(saver, self.problem.ops[saver.op].again.offset) for saver in savers]
        for level, (first, last) in self._spans(stage):
            reads = [s for s, at in offsets if s.start and s.start <= level < s.end and first <= at <= last]
            if not reads:
                continue
            earlier: Expression = {}  # - sum of x[u]
            for variable in (v for s, at in offsets if not s.start and at < first for v in self.counts.uses(s)):
                add(earlier, variable, -1.0)
            besides = {self.program.variable("besides"): 1.0}
            self.counts.largest("besides", besides, [total(self.counts.uses(s), earlier) for s in reads])
            for variable in besides:
                add(self.stages[stage].block.besides.setdefault((level, (first, last)), {}), variable, size)

    def _copy_of_several_stages(self, size: int, savers: list[Saver]) -> None:
        """Add a storage that several stages, or all blocks of one, keep once; it counts from the first of them on."""
        first = min(self.problem.ops[saver.op].stage for saver in savers)
        kept = self.program.variable("kept")
        for target, *_ in self.counts.targets(first):
            add(target, kept, size)
        before: dict[int, int] = {}  # by stage
        for saver in sorted(savers, key=lambda saver: saver.op):
            stage = self.problem.ops[saver.op].stage
            uses, right = [(self.model.x[saver.op][i], -1.0) for i in saver.choices], 0.0  # many >= x[v]
            if saver.start:  # only if any block is at such a level: many >= x[v] + q - 1
                uses, right = [*uses, (self.model.any_recomputed[stage][saver.start - 1], -1.0)], -1.0
            if stage in self.model.recomputed:  # only if any block is not recomputed
                self.program.at_least("kept", [(kept, 1.0), (self.model.kept(stage), -1.0), *uses], right - 1.0)
            else:
                self.program.at_least("kept", [(kept, 1.0), *uses], right)
            if stage == first or stage in self.model.recomputed:
                kept_by_now = self.program.variable("saved")
                kept_earlier = [(kept, 1.0)] if stage != first else []  # kept since an earlier stage, not recomputed
                self.program.at_least("saved", [(kept_by_now, 1.0), *kept_earlier, *uses], right)
                keep(self.stages[stage].block.by_op, saver.op, kept_by_now, size)
                if stage in before:
                    self.program.at_least("saved", [(kept_by_now, 1.0), (before[stage], -1.0)], 0.0)
                    keep(self.stages[stage].block.by_op, saver.op, before[stage], -size)
                before[stage] = kept_by_now

    def _from_outside(self) -> Iterator[Tensor]:
        """Tensors that recomputable blocks read from other blocks; parameters and inputs are there anyway."""
        for tensor in self.problem.tensors:
            if tensor.kind not in ("first", "next", "outer") or tensor.stage not in self.model.recomputed:
                continue
            node = self.problem.ops[tensor.source].node
            if self.memory.is_parameter(node) or is_cast_input(node):
                continue
            if any(in_segment(self.problem.ops[u.op].node) for u in tensor.uses):
                yield tensor

    def _input_of_recomputed_blocks(self, tensor: Tensor) -> None:
        """Blocks recomputed as a whole keep a tensor that they read from outside, in the layout in which it was made.

        These are the first r blocks of the stage: the first (q: whether there is one) reads the stage before, and the
        r - q others each read the block before them.
        """
        stage, op, is_next = tensor.stage, self.problem.ops[tensor.source], tensor.kind == "next"
        copies = [self.memory.copy(self.problem.ref(tensor), c.strategy.outputs[tensor.output]) for c in op.choices]
        sizes = [self.memory.copy_bytes(copy) for copy in copies]
        if not any(sizes):
            return
        kept = self.stages[stage].kept
        r, q = self.model.recomputed[stage][-1], self.model.any_recomputed[stage][-1]
        times: Expression = {r: 1.0, q: -1.0} if is_next else {q: 1.0}
        most_times = self.problem.stages[stage].count - 1 if is_next else 1
        choices = [[v] for v in self.model.x[tensor.source]]
        counts = counted(self.program, choices, times, most_times).tolist()
        terms = [*zip(counts, sizes, strict=True)]
        for copy in () if is_next else dict.fromkeys(copies):  # less the copies that ops of earlier stages keep already
            variables = [variable for variable, other in zip(counts, copies, strict=True) if other == copy]
            handed = self.neighbours.kept_before(variables, self.copies.before(stage, copy))
            if handed is not None:
                terms.append((handed, -self.memory.copy_bytes(copy)))
        for variable, size in terms:
            for target in (kept.all_blocks, *kept.but_last, kept.but_last_two, kept.inputs):
                add(target, variable, size)
            if not is_next:
                add(kept.first_inputs, variable, size)
