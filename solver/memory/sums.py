"""Sums and maxima of bytes as variables of the ILP, and rows that bound sums of these by the peak."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.transfer_bytes import TransferBytes
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import arrays_of
from autopar.solver.memory.stage_bytes import UNIT, add
from autopar.solver.seconds.replays import Expression


class Sums:
    """Adds variables and rows to a program; `peak`, like all variables made here, is in MiB."""

    def __init__(self, program: Program, peak: int) -> None:
        self.program, self.peak = program, peak

    def largest(self, name: str, sizes: Sequence[tuple[Expression, float, float]]) -> int | None:
        """A variable that is at least each of some expressions in bytes, given with a lower and an upper bound; None if
        all are 0."""
        floor = max((low for _, low, _ in sizes), default=0.0)
        if not any(high for _, _, high in sizes):
            return None
        largest = self.program.variable(name, lower=floor / UNIT, upper=None, whole=False)
        for terms, _, high in sizes:
            if high > floor:
                self.program.at_least(name, {v: -c / UNIT for v, c in terms.items()} | {largest: 1.0}, 0.0)
        return largest

    def bucket(
        self, field: str, reads: Sequence[Sequence[tuple[TransferBytes, int]]], together: bool = False
    ) -> int | None:
        """See `solver.memory.stage_bytes.BucketBytes`."""
        terms: Expression = {}
        alone = []
        for read in reads:
            of_read: Expression = {}
            for transfer, variable in read:
                add(terms, variable, getattr(transfer, field))
                add(of_read, variable, transfer.alone * getattr(transfer, field))
            if not together and any(transfer.alone > 1.0 for transfer, _ in read):
                alone.append((of_read, 0.0, max(of_read.values(), default=0.0)))
        if not alone or not terms:
            return self.sum(field, terms)
        return self.largest(field, [(terms, 0.0, float("inf")), *alone])

    def sum(self, name: str, terms: Expression, more: int | None = None, *, lower: float = 0.0) -> int | None:
        """A variable equal to a sum of bytes plus the variable `more`."""
        if not terms:
            return more
        total = self.program.variable(name, lower=lower, upper=None, whole=False)
        row = {v: -c / UNIT for v, c in terms.items()}
        if more is not None:
            add(row, more, -1.0)
        self.program.equal(name, row | {total: 1.0}, 0.0)
        return total

    def at_most(self, name: str, sums: Sequence[Sequence[int | None]], terms: Expression, right: float = 0.0) -> None:
        """Rows: each of some sums of variables, plus terms in bytes common to all, is at most the peak plus `right`."""
        variables, sizes = arrays_of(terms)
        for parts in sums:
            own = [(v, 1.0) for v in parts if v is not None]
            if own or terms:
                self.program.at_most(name, [*own, (self.peak, -1.0)], right, further=(variables, sizes / UNIT))
