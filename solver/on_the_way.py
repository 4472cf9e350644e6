"""Parameters on their way in the backward of each stage, as expressions that memory rows add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cost.moving import Moving
from autopar.solver.problem import Problem
from autopar.solver.replays import Expression
from autopar.solver.stage_bytes import add

Sum = Callable[[str, Expression, int | None], int | None]


class OnTheWay:
    """Buckets in the backward of each stage: what moves of the parameters that its ops `read`, and of those whose
    gradients are `reduced` behind it, by the flows that they take."""

    def __init__(
        self,
        problem: Problem,
        read: Sequence[Sequence[tuple[Moving, int]]],
        reduced: Sequence[Sequence[tuple[Moving, int]]],
        total: Sum,
    ) -> None:
        self.grouping, self.stages = problem.grouping, problem.stages
        self.first = [sum(stage.count for stage in self.stages[:i]) for i in range(len(self.stages))]  # regions
        self.stage_of = [i for i, stage in enumerate(self.stages) for _ in range(stage.count)]
        self.reductions = [_expression(some, "reduction") for some in reduced]
        kinds = (("gathered", read), ("begun", read), ("left_behind", reduced), ("others", reduced))
        self.gathered, self.begun, self.left_behind, self.others = (
            [total(kind, _expression(some, kind), None) for some in by_stage] for kind, by_stage in kinds
        )

    def last_block(self, stage: int) -> dict[bool, list[int | None]]:
        """What is under way in the backward of a stage's last block, before and since it reads a gathered parameter."""
        return self._of(self.first[stage] + self.stages[stage].count - 1)

    def blocks(self, stage: int) -> list[dict[bool, list[int | None]]]:
        """The same for all of its blocks but the last of several, each case once."""
        first, count = self.first[stage], self.stages[stage].count
        found: list[dict[bool, list[int | None]]] = []
        for region in range(first, first + max(1, count - 1)):
            case = self._of(region)
            if case not in found:
                found.append(case)
        return found

    def _of(self, region: int) -> dict[bool, list[int | None]]:
        """As in `autopar.cost.moments`."""
        own = self.stage_of[region]
        before, after = self.grouping.before(region), self.grouping.after(region)
        always = [
            self.others[own] if self.grouping.goes_on(region) else None,
            self.left_behind[self.stage_of[after]] if after is not None else None,
        ]
        gathered = self.gathered[own]
        arriving = self.gathered[self.stage_of[before]] if before is not None else None
        further = self.grouping.before(before) if before is not None else None
        begun = self.begun[self.stage_of[further]] if further is not None else None
        return {
            False: [*always, gathered if self.grouping.ahead(region) else None],
            True: [*always, gathered, arriving, begun],
        }


def _expression(moving: Sequence[tuple[Moving, int]], kind: str) -> Expression:
    found: Expression = {}
    for one, variable in moving:
        add(found, variable, getattr(one, kind))
    return found
