"""In how many blocks an op keeps what it saves, as expressions of the program's variables."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.memory.savers import Saver
from autopar.solver.memory.stage_bytes import StageBytes, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression


class Counts:
    """Of the blocks of a model's stages."""

    def __init__(self, model: Model, stages: Sequence[StageBytes]) -> None:
        self.model, self.program, self.problem, self.stages = model, model.program, model.problem, stages

    def held(self, stage: int) -> list[tuple[Expression, int, int]]:
        """Where bytes that blocks keep are counted: from which level on, and how many of its last blocks do not count,
        fewest first."""
        data, many = self.stages[stage], self.problem.stages[stage].count
        found = [(data.held, 0, 0)]
        found += [(target, level, 1) for level, target in enumerate(data.held_but_one) if many > 1]
        return [*found, (data.held_but_two, 0, 2)] if many > 2 else found

    def least(self, level: int, left_out: int) -> float:
        """What a count may be at least: where no block has a level, without the last of that level it is -1."""
        return -1.0 if level and left_out else 0.0

    def of_choice(self, saver: Saver, choice: int, level: int, left_out: int) -> Expression:
        """In how many blocks of at least a level, so many of the last of that level left out, a choice's op keeps."""
        op, start = self.problem.ops[saver.op], max(saver.start, level)
        variable = self.model.x[saver.op][choice]
        if saver.end and start >= saver.end:
            return {}
        found: Expression = {}
        if start:
            found[int(self.model.z(saver.op, start)[choice])] = 1.0
        else:
            found[variable] = float(self.model.costs.count(op))
        if saver.end:
            found[int(self.model.z(saver.op, saver.end)[choice])] = -1.0
        if saver.start <= level:
            add(found, variable, -float(left_out))
        return found

    def of(self, saver: Saver, level: int, left_out: int) -> Expression:
        """The same under all choices of a saver."""
        found: Expression = {}
        for i in saver.choices:
            for variable, coefficient in self.of_choice(saver, i, level, left_out).items():
                add(found, variable, coefficient)
        return found

    def uses(self, saver: Saver) -> Expression:
        """Whether an op keeps a copy where it is not recomputed."""
        return dict.fromkeys((self.model.x[saver.op][i] for i in saver.choices), 1.0)

    def some(self, savers: Sequence[Saver]) -> int:
        """A variable that is at most 1, and 0 where none of these ops keeps a storage."""
        one = self.program.variable("some")
        uses = [(v, -1.0) for saver in savers for v in self.uses(saver)]
        self.program.at_most("some", [(one, 1.0), *uses], 0.0)
        return one

    def largest(self, name: str, one: Expression, least: Sequence[Expression]) -> None:
        """A variable is at least each of some expressions."""
        for terms in least:
            if terms:
                self.program.at_least(name, [*one.items(), *((v, -c) for v, c in terms.items())], 0.0)
