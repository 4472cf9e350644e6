"""What a block keeps of what it reads, and the one that made it keeps too, counts once.

Of equal blocks, the first ones recompute most (`solver.memory.rows`): each is followed by one that recomputes no more
than it does. So where ops keep what a block reads at every level at which others keep the same of what a block makes,
all that blocks keep of what they make is kept by the next ones too, but for the last one's. If N blocks keep what they
read, and M what they make, the latter adds::

    all blocks          kept >= M - N,  kept >= 1 if the last block keeps it     beside N
    all but the last    kept >= M - 1 - N                                        beside N - 1, and what the last reads

What the last one reads counts with its own ops, so that its turn begins with it: it is `brought`. Ops of a stage and
those before or behind it that keep the same count once too, where both ends surely keep it.

What still counts twice: what blocks keep of what they read at fewer levels than those at which the blocks that made it
do; what is brought to a block where the one before recomputes and does not keep it, until the first op that does; what
the first block keeps and ops before it do, in its own turn and in those of blocks that recompute. And what only the
first block's ops convert lives for that moment in the turns of all blocks of its stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.memory.savers import Saver
from autopar.solver.memory.stage_bytes import add, keep
from autopar.solver.seconds.counts import Counts
from autopar.solver.seconds.replays import Expression


class Neighbours:
    """Of the blocks of a model's stages, and what stands before and behind them."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.model, self.program = counts, counts.model, counts.program
        self.problem, self.stages = counts.problem, counts.stages

    def brought(self, stage: int, size: int, savers: Sequence[Saver], behind: Sequence[Saver]) -> list[Saver]:
        """Those who keep in the next block, at every level at which the one that makes it does, what is counted there
        alone; until the first op that does, it is there beside."""
        ends = {saver.end for saver in savers}
        end = 0 if 0 in ends else max(ends)
        readers = [reader for reader in behind if reader.outlasts(end)]
        if not readers:
            return []
        data, both = self.stages[stage], {self.program.variable("both"): 1.0}
        data.brought_until = max(data.brought_until, end or len(data.least))
        for saver in savers:
            for reader in readers:
                uses = [(v, -c) for one in (saver, reader) for v, c in self.counts.uses(one).items()]
                self.program.at_least("both", [*both.items(), *uses], -1.0)
        for variable in both:
            keep(data.brought, -1, variable, size)
        ops, before = sorted({reader.op for reader in readers}), both
        for number in ops:
            rest: Expression = {}
            if number != ops[-1]:
                rest = {self.program.variable("rest"): 1.0}
                kept = [self.counts.uses(reader) for reader in readers if reader.op <= number]
                terms = [(v, c) for uses in kept for v, c in uses.items()]
                self.program.at_least("rest", [*rest.items(), *((v, -c) for v, c in both.items()), *terms], 0.0)
            for some, sign in ((rest, 1.0), (before, -1.0)):
                for variable in some:
                    keep(data.brought, number, variable, sign * size)
            before = rest
        return readers

    def held(self, stage: int, size: int, savers: Sequence[Saver], readers: Sequence[Saver]) -> None:
        """What blocks make and keep between the same levels, beside what the next ones keep of it."""
        for held, level, left_out in self.counts.held(stage):
            each = [terms for saver in savers if (terms := self.counts.of(saver, level, left_out))]
            if not each:
                continue
            many = self.program.variable("kept", upper=None)
            add(held, many, size)
            theirs = [(v, c) for reader in readers for v, c in self.counts.of(reader, level, 0).items()]
            for terms in each:
                row = [(many, 1.0), *((v, -c) for v, c in terms.items()), *theirs]
                self.program.at_least("kept", row, 0.0)
            for saver in [] if left_out else savers:
                self._of_last_block(stage, many, saver)

    def _of_last_block(self, stage: int, many: int, saver: Saver) -> None:
        """A count is at least 1 where the last of several blocks keeps what an op saves."""
        terms, right = [(many, 1.0), *((v, -1.0) for v in self.counts.uses(saver))], 0.0
        if saver.end:
            terms, right = [*terms, (self.model.kept(stage, saver.end), -1.0)], right - 1.0
        if saver.start:
            r, count = self.model.recomputed[stage][saver.start - 1], self.problem.stages[stage].count
            terms, right = [*terms, (r, -1.0)], right - count
        self.program.at_least("last", terms, right)

    def behind(self, stage: int, size: int, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """What the last of equal blocks keeps already counts no more where ops behind them keep it too."""
        one = self.kept_before(self._choices(savers), makers)
        if one is not None:
            keep(self.stages[stage].block, max(saver.op for saver in savers), one, -size)
            for held, *_ in self.counts.held(stage):
                add(held, one, -size)

    def before(self, stage: int, size: int, savers: Sequence[Saver], makers: Sequence[Saver]) -> None:
        """What the first of equal blocks keeps of others counts no more for those behind it where ops before keep it
        already; in its own turn, and in those of blocks that recompute, it does."""
        savers = [saver for saver in savers if not saver.start]
        one = self.kept_before(self._choices(savers), makers) if savers else None
        if one is None:
            return
        for end in {saver.end for saver in savers} - {0}:  # the first block is at no level that drops it
            self.program.at_most("handed", [(one, 1.0), (self.model.any_recomputed[stage][end - 1], 1.0)], 1.0)
        for held, level, _ in self.counts.held(stage):
            if not level:
                add(held, one, -size)

    def kept_before(self, some: Sequence[int], makers: Sequence[Saver]) -> int | None:
        """A variable that is 0 but where one of `some` is 1 and an op that makes a storage keeps it already."""
        makers = [saver for saver in makers if not saver.start]
        if not makers:
            return None
        one = self.program.variable("handed")
        for uses in (some, self._choices(makers)):
            self.program.at_most("handed", [(one, 1.0), *((v, -1.0) for v in uses)], 0.0)
        for maker in makers:
            if maker.end:  # the last block is at no level that drops it
                at = self.problem.ops[maker.op].stage
                r, many = self.model.recomputed[at][maker.end - 1], float(self.problem.stages[at].count)
                self.program.at_most("handed", [(one, 1.0), (r, 1.0)], many)
        return one

    def _choices(self, savers: Sequence[Saver]) -> list[int]:
        return [variable for saver in savers for variable in self.counts.uses(saver)]
