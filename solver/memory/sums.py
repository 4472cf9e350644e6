"""Sums and maxima of bytes as variables of a program, and the rows that add them up below a peak."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.moving import Moving
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import arrays_of
from autopar.solver.memory.stage_bytes import UNIT, add
from autopar.solver.seconds.replays import Expression


class Sums:
    """Of a program; `peak`: a variable, in MiB as all that are made here."""

    def __init__(self, program: Program, peak: int) -> None:
        self.program, self.peak = program, peak

    def largest(self, name: str, sizes: Sequence[tuple[Expression, float, float]]) -> int | None:
        """A variable (in MiB) at least as large as each of some expressions, given with their least and most."""
        floor = max((low for _, low, _ in sizes), default=0.0)
        if not any(high for _, _, high in sizes):
            return None
        largest = self.program.variable(name, lower=floor / UNIT, upper=None, whole=False)
        for terms, _, high in sizes:
            if high > floor:
                self.program.at_least(name, {v: -c / UNIT for v, c in terms.items()} | {largest: 1.0}, 0.0)
        return largest

    def bucket(self, kind: str, reads: Sequence[Sequence[tuple[Moving, int]]], together: bool = False) -> int | None:
        """`solver.memory.stage_bytes.BucketBytes`."""
        terms: Expression = {}
        each = []
        for some in reads:
            own: Expression = {}
            for one, variable in some:
                add(terms, variable, getattr(one, kind))
                add(own, variable, one.alone * getattr(one, kind))
            if not together and any(one.alone > 1.0 for one, _ in some):
                each.append((own, 0.0, max(own.values(), default=0.0)))
        if not each or not terms:
            return self.sum(kind, terms)
        return self.largest(kind, [(terms, 0.0, float("inf")), *each])

    def sum(self, name: str, terms: Expression, more: int | None = None, *, lower: float = 0.0) -> int | None:
        """A variable equal to a sum of bytes (in MiB), and another such variable."""
        if not terms:
            return more
        found = self.program.variable(name, lower=lower, upper=None, whole=False)
        row = {v: -c / UNIT for v, c in terms.items()}
        if more is not None:
            add(row, more, -1.0)
        self.program.equal(name, row | {found: 1.0}, 0.0)
        return found

    def at_most(self, name: str, sums: Sequence[Sequence[int | None]], terms: Expression, right: float = 0.0) -> None:
        """Each of some sums of variables, with terms that all of them have in common, is at most the peak."""
        variables, sizes = arrays_of(terms)
        for parts in sums:
            own = [(v, 1.0) for v in parts if v is not None]
            if own or terms:
                self.program.at_most(name, [*own, (self.peak, -1.0)], right, more=(variables, sizes / UNIT))
