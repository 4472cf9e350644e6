"""Overlap of communication and compute as savings in the objective: the rows of `cost.overlap`, with its letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.cost.overlap import Movable, hidden_seconds
from autopar.solver.linear.terms import Array, Linear

if TYPE_CHECKING:
    from autopar.solver.model import Model

Key = tuple[str, int, int]  # kind, stretch, mesh axis (-1 for compute)


class Overlap:
    """The seconds that a model saves by overlap. Its variables count in `unit` seconds, the unit of the program's
    objective, so that the solver gets numbers of similar size."""

    def __init__(self, model: Model, unit: float) -> None:
        self.model, self.program, self.unit = model, model.program, unit
        self.stretches = model.problem.grouping.stretches
        self.micro_batches = model.problem.memory.micro_batches
        self.part = model.problem.cluster.device.overlap
        self.forward = [Linear() for _ in self.stretches]
        self.backward = [Linear() for _ in self.stretches]
        self.rows: dict[Key, int] = {}  # the row in which these seconds are summed up
        self._compute()
        self.hidden = self._sum(self._rows())
        model.seconds.add(self.hidden, -unit)

    def seconds(self, values: Array) -> float:
        """The most seconds that can be hidden with these values of the program's variables."""
        movable = {axis: Movable(len(self.stretches)) for _, _, axis in self.model.movable}
        for (kind, c, axis), terms in self.model.movable.items():
            getattr(movable[axis], kind)[c] = _value(terms, values)
        forward, backward = (
            [_value(terms, values) for terms in stretch_terms] for stretch_terms in (self.forward, self.backward)
        )
        return hidden_seconds(self.stretches, list(movable.values()), forward, backward, self.micro_batches, self.part)

    def _compute(self) -> None:
        problem = self.model.problem
        for number, op in enumerate(problem.ops):
            c, count = problem.grouping.stretch(op.node), self.model.costs.count(op)
            for variable, choice in zip(self.model.x[number], op.choices, strict=True):
                for target, seconds in (
                    (self.forward[c], choice.forward_seconds),
                    (self.backward[c], choice.backward_seconds),
                ):
                    target.add(variable, count * seconds)

    def _rows(self) -> list[int]:
        """The variables g_c and b of every axis, whose sum is the hidden time."""
        pairs = enumerate(zip(self.forward, self.backward, strict=True))
        compute = [
            (self._of(forward, ("forward", c, -1)), self._of(backward, ("backward", c, -1)))
            for c, (forward, backward) in pairs
        ]
        axes = sorted({axis for _, _, axis in self.model.movable})
        return [variable for axis in axes for variable in self._rows_of(axis, compute)]

    def _rows_of(self, axis: int, compute: Sequence[tuple[int | None, int | None]]) -> list[int]:
        """The rows of one axis; returns its g_c and b. `compute`: by stretch, variables for F_c and B_c, None for 0.

        `again` has the a_c, `reduced` is t_c, and `before` has B_1, ..., B_(c-1).
        """
        hidden: list[int] = []
        again: list[int] = []
        reduced: int | None = None
        before: list[int] = []
        for c, (stretch, (forward, backward)) in enumerate(zip(self.stretches, compute, strict=True)):
            own = 1 - 1 / (stretch.count * stretch.buckets)
            for kind, behind, hidden_parts in (("gathers", forward, hidden), ("again", backward, again)):
                moved = self._saving(kind, c, axis)
                if moved is not None and behind is not None and own:
                    limits = [[(moved, 1.0)], [(behind, self.micro_batches * own)]]
                    hidden_parts.append(self._least(limits))
            moved = self._saving("reductions", c, axis)
            if moved is not None:
                sooner = [(b, 1.0) for b in before]
                late = [(backward, own)] if backward is not None else []
                first = [(backward, (1 - 1 / stretch.buckets) / stretch.count)] if backward is not None else []
                reduced = self._least(
                    [
                        [(moved, 1.0), *([(reduced, 1.0)] if reduced is not None else [])],
                        [*sooner, *late],
                        [*sooner, *first, (moved, 1 - 1 / stretch.count)],
                    ]
                )
            if backward is not None:
                before.append(backward)
        moved_backward = [*again, *([reduced] if reduced is not None else [])]
        if moved_backward:
            hidden.append(
                self._least([[(v, 1.0) for v in moved_backward], [(b, float(self.micro_batches)) for b in before]])
            )
        return hidden

    def _saving(self, kind: str, c: int, axis: int) -> int | None:
        """A variable for the most that the collectives of one kind, stretch and axis can save; None without any."""
        key = kind, c, axis
        terms = self.model.movable.get(key)
        return self._of(terms, key, self.part) if terms is not None else None

    def _of(self, expression: Linear, key: Key, part: float = 1.0) -> int | None:
        """A variable equal to `part` of an expression in seconds, in units; None if the expression is empty."""
        terms = expression.terms(part / self.unit)
        if not len(terms[0]):
            return None
        variable = self._variable()
        self.rows[key] = self.program.equal_to_sum("seconds", variable, terms)
        return variable

    def _least(self, limits: Sequence[Sequence[tuple[int, float]]]) -> int:
        """A variable that is at most each of `limits`: their minimum, as the objective maximises it."""
        least = self._variable()
        for limit in limits:
            self.program.at_most("hidden", [(least, 1.0)] + [(v, -s) for v, s in limit], 0.0)
        return least

    def _sum(self, parts: Sequence[int]) -> int:
        total = self._variable()
        self.program.equal("hidden", [(total, 1.0)] + [(v, -1.0) for v in parts], 0.0)
        return total

    def _variable(self) -> int:
        return self.program.variable("hidden", upper=None, whole=False)


def _value(expression: Linear, values: Array) -> float:
    variables, seconds = expression.terms()
    return float(seconds @ values[variables])
