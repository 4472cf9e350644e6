"""A tensor that one block makes and the next one reads counts once if both keep it for backward.

Of equal blocks, the first ones recompute most (`solver.memory.rows`): each is followed by one that recomputes no more
than it does. So if readers in the next block keep such a tensor at every level at which the block that makes it does,
each block that keeps it as its maker is followed by one that keeps it too, except the last block. If N blocks keep the
tensor as readers and M as makers, the latter add::

    all blocks          kept >= M - N,  kept >= 1 if the last block keeps it     beside N
    all but the last    kept >= M - 1 - N                                        beside N - 1, and what the last reads

What the last block reads counts with its own ops, and is there when its turn begins: it is `brought`. A tensor that is
kept by ops of a stage and by ops before or after the stage counts once too, where both surely keep it.

Some tensors still count twice: those that readers keep at fewer levels than makers do; those brought to a block though
the block before recomputes and does not keep them, until the first op that keeps them; and those that the first block
and ops before it keep, in the turns of the first block and of blocks that recompute. And what only the first block's
ops convert counts at that point in the turns of all blocks of its stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.memory.savers import Saver
from autopar.solver.memory.stage_bytes import add, keep
from autopar.solver.seconds.counts import Counts
from autopar.solver.seconds.replays import Expression


class Neighbours:
    """Corrects what the blocks of a model's stages keep for what their neighbours keep too."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.model, self.program = counts, counts.model, counts.program
        self.problem, self.stages = counts.problem, counts.stages

    def brought(self, stage: int, size: int, savers: Sequence[Saver], behind: Sequence[Saver]) -> list[Saver]:
        """The ops of the next block (`behind`) that keep a tensor at every level at which its maker's block does, so
        that it counts there alone; until the first of them has run, it counts as `brought` to that block."""
        ends = {saver.end for saver in savers}
        end = 0 if 0 in ends else max(ends)
        readers = [reader for reader in behind if reader.outlasts(end)]
        if not readers:
            return []
        block, both = self.stages[stage].block, {self.program.variable("both"): 1.0}
        block.brought_until = max(block.brought_until, end or len(self.stages[stage].kept.least_by_level))
        for saver in savers:
            for reader in readers:
                uses = [(v, -c) for keeper in (saver, reader) for v, c in self.counts.uses(keeper).items()]
                self.program.at_least("both", [*both.items(), *uses], -1.0)
        for variable in both:
            keep(block.brought, -1, variable, size)
        ops, brought_before = sorted({reader.op for reader in readers}), both
        for number in ops:
            not_yet_kept: Expression = {}
            if number != ops[-1]:
                not_yet_kept = {self.program.variable("rest"): 1.0}
                kept = [self.counts.uses(reader) for reader in readers if reader.op <= number]
                terms = [(v, c) for uses in kept for v, c in uses.items()]
                self.program.at_least("rest", [*not_yet_kept.items(), *((v, -c) for v, c in both.items()), *terms], 0.0)
            for variables, sign in ((not_yet_kept, 1.0), (brought_before, -1.0)):
                for variable in variables:
                    keep(block.brought, number, variable, sign * size)
            brought_before = not_yet_kept
        return readers

    def beyond_readers(self, stage: int, size: int, savers: Sequence[Saver], readers: Sequence[Saver]) -> None:
        """Add what blocks make and keep between the same levels, beyond what the next blocks' `readers` keep of it."""
        for target, level, left_out in self.counts.targets(stage):
            by_saver = [terms for saver in savers if (terms := self.counts.of(saver, level, left_out))]
            if not by_saver:
                continue
            count = self.program.variable("kept", upper=None)
            add(target, count, size)
            of_readers = [(v, c) for reader in readers for v, c in self.counts.of(reader, level, 0).items()]
            for terms in by_saver:
                row = [(count, 1.0), *((v, -c) for v, c in terms.items()), *of_readers]
                self.program.at_least("kept", row, 0.0)
            for saver in [] if left_out else savers:
                self._of_last_block(stage, count, saver)

    def _of_last_block(self, stage: int, blocks: int, saver: Saver) -> None:
        """Bound the count `blocks` from below by 1 where the last of several blocks keeps what an op saves."""
        terms, right = [(blocks, 1.0), *((v, -1.0) for v in self.counts.uses(saver))], 0.0
        if saver.end:
            terms, right = [*terms, (self.model.kept(stage, saver.end), -1.0)], right - 1.0
        if saver.start:
            r, count = self.model.recomputed[stage][saver.start - 1], self.problem.stages[stage].count
            terms, right = [*terms, (r, -1.0)], right - count
        self.program.at_least("last", terms, right)

    def behind(self, stage: int, size: int, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """A tensor that the last of equal blocks makes and keeps does not count again with ops after the blocks."""
        handed = self.kept_before(self._choices(savers), makers)
        if handed is not None:
            keep(self.stages[stage].block.by_op, max(saver.op for saver in savers), handed, -size)
            for target, *_ in self.counts.targets(stage):
                add(target, handed, -size)

    def before(self, stage: int, size: int, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """A tensor from before that the first of equal blocks keeps does not count again in the turns of later blocks
        if ops before keep it already; in the turns of the first block and of blocks that recompute it does."""
        savers = [saver for saver in savers if not saver.start]
        handed = self.kept_before(self._choices(savers), makers) if savers else None
        if handed is None:
            return
        for end in {saver.end for saver in savers} - {0}:  # only if the first block is at no level that drops it
            self.program.at_most("handed", [(handed, 1.0), (self.model.any_recomputed[stage][end - 1], 1.0)], 1.0)
        for target, level, _ in self.counts.targets(stage):
            if not level:
                add(target, handed, -size)

    def kept_before(self, choices: Sequence[int], makers: Sequence[Saver]) -> int | None:
        """A variable that can be 1 only if one of `choices` is 1 and one of the `makers` surely keeps the storage."""
        makers = [saver for saver in makers if not saver.start]
        if not makers:
            return None
        handed = self.program.variable("handed")
        for uses in (choices, self._choices(makers)):
            self.program.at_most("handed", [(handed, 1.0), *((v, -1.0) for v in uses)], 0.0)
        for maker in makers:
            if maker.end:  # only if the last block is at no level that drops it
                stage = self.problem.ops[maker.op].stage
                r, blocks = self.model.recomputed[stage][maker.end - 1], float(self.problem.stages[stage].count)
                self.program.at_most("handed", [(handed, 1.0), (r, 1.0)], blocks)
        return handed

    def _choices(self, savers: Sequence[Saver]) -> list[int]:
        return [variable for saver in savers for variable in self.counts.uses(saver)]
