"""The number of blocks in which an op keeps its saved tensors, as expressions of the program's variables."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.memory.savers import Saver
from autopar.solver.memory.stage_bytes import StageBytes, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression


class Counts:
    """Counts of the blocks of a model's stages that keep something, by level of recompute."""

    def __init__(self, model: Model, stages: Sequence[StageBytes]) -> None:
        self.model, self.program, self.problem, self.stages = model, model.program, model.problem, stages

    def targets(self, stage: int) -> list[tuple[Expression, int, int]]:
        """The expressions (of `StageBytes`) that sum up the bytes that blocks keep, each with the level from which on
        blocks count and the number of last blocks of that level that are left out, fewest first."""
        kept, blocks = self.stages[stage], self.problem.stages[stage].count
        cases = [(kept.kept.all_blocks, 0, 0)]
        cases += [(target, level, 1) for level, target in enumerate(kept.kept.but_last) if blocks > 1]
        return [*cases, (kept.kept.but_last_two, 0, 2)] if blocks > 2 else cases

    def least(self, level: int, left_out: int) -> float:
        """The least value of a count: if no block is at a level, the count without that level's last block is -1."""
        return -1.0 if level and left_out else 0.0

    def of_choice(self, saver: Saver, choice: int, level: int, left_out: int) -> Expression:
        """The number of blocks at `level` or above, without the last `left_out` blocks of that level, in which the
        saver keeps its copy with this choice."""
        op, start = self.problem.ops[saver.op], max(saver.start, level)
        variable = self.model.x[saver.op][choice]
        if saver.end and start >= saver.end:
            return {}
        blocks: Expression = {}
        if start:
            blocks[int(self.model.z(saver.op, start)[choice])] = 1.0
        else:
            blocks[variable] = float(self.model.costs.count(op))
        if saver.end:
            blocks[int(self.model.z(saver.op, saver.end)[choice])] = -1.0
        if saver.start <= level:
            add(blocks, variable, -float(left_out))
        return blocks

    def of(self, saver: Saver, level: int, left_out: int) -> Expression:
        """The sum of `of_choice` over all choices of a saver."""
        total: Expression = {}
        for i in saver.choices:
            for variable, coefficient in self.of_choice(saver, i, level, left_out).items():
                add(total, variable, coefficient)
        return total

    def uses(self, saver: Saver) -> Expression:
        """An expression that is 1 if the op keeps the copy in blocks that do not recompute."""
        return dict.fromkeys((self.model.x[saver.op][i] for i in saver.choices), 1.0)

    def any_keeps(self, savers: Sequence[Saver]) -> int:
        """A variable that is at most 1, and 0 if none of these ops keeps the storage."""
        any_keeps = self.program.variable("any keeps")
        uses = [(v, -1.0) for saver in savers for v in self.uses(saver)]
        self.program.at_most("any keeps", [(any_keeps, 1.0), *uses], 0.0)
        return any_keeps

    def largest(self, name: str, upper_bound: Expression, expressions: Sequence[Expression]) -> None:
        """Add rows by which the expression `upper_bound` is at least each of the `expressions`."""
        for terms in expressions:
            if terms:
                self.program.at_least(name, [*upper_bound.items(), *((v, -c) for v, c in terms.items())], 0.0)
