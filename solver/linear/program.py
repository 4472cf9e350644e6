"""A mixed-integer linear program as lists and arrays; `engines` and `relaxation` solve it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.solver.linear.engines import Engine, engine, is_highs, optimise
from autopar.solver.linear.highs import Basis
from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.outcome import INTEGRALITY, NONE, Bounds, Outcome
from autopar.solver.linear.records import CountProducts, Flows, Implied, Records
from autopar.solver.linear.relaxation import Relaxation
from autopar.solver.linear.shared_columns import SharedColumns
from autopar.solver.linear.terms import Array, Entries, Terms

# Up to so many columns, HiGHS's presolve must not aggregate: it lost the optimum of a program of 142 columns whose
# memory rows had entries of 1e-5 (seed 65 of `test_counts_of_nested_levels`).
_MAX_COLUMNS_UNAGGREGATED = 2_000


@dataclass
class Program:
    """Minimise `cost @ x` over `lower <= x <= upper` and rows; some variables are integers.

    It is built row by row; what there is much of (flows, the conversions they pay, counts of their replays) is added as
    arrays. When it is complete, `matrix` gives the whole program as arrays, from which it is solved.
    """

    names: list[str] = field(default_factory=list)
    lower: array[float] = field(default_factory=lambda: array("d"))
    upper: array[float] = field(default_factory=lambda: array("d"))
    integer: bytearray = field(default_factory=bytearray)
    whole: bytearray = field(default_factory=bytearray)  # whether it is 0 or at least 1 in every integer solution
    cost: Array = field(default_factory=lambda: NONE)  # of all variables
    rows: list[tuple[str, int, float]] = field(default_factory=list)  # name, sense (-1: at most, 1: at least), right
    entries: Entries = field(default_factory=Entries)
    budget: int | None = None  # variable whose upper bound makes relaxations slow, but mostly costs little
    records: Records = field(default_factory=Records)  # rows by their meaning
    shared_columns: SharedColumns = field(default_factory=SharedColumns)
    _matrix: Matrix | None = None
    _root: tuple[Array, Outcome] | None = None  # the costs and the relaxation of the whole program

    @property
    def has_counts(self) -> bool:
        """Whether the program decides how many blocks recompute."""
        return bool(self.records.counts)

    def variable(
        self, name: str, *, lower: float = 0.0, upper: float | None = 1.0, integer: bool = False, whole: bool = True
    ) -> int:
        """Add a variable, by default continuous in [0, 1]; returns its number.

        `whole`: in every integer solution it is 0 or at least 1, even if it is declared continuous.
        """
        self.names.append(name)
        self.lower.append(lower)
        self.upper.append(math.inf if upper is None else upper)
        self.integer.append(integer)
        self.whole.append(whole)
        return len(self.names) - 1

    def variables(self, name: str, number: int, *, upper: float | None = 1.0) -> Array:
        """Add `number` equal continuous variables; returns their numbers."""
        first = len(self.names)
        self.names += [name] * number
        self.lower += array("d", [0.0]) * number
        self.upper += array("d", [math.inf if upper is None else upper]) * number
        self.integer += bytes(number)
        self.whole += b"\1" * number
        return np.arange(first, first + number)

    def equal(self, name: str, terms: Terms, right: float) -> int:
        """Add the row `terms == right`; returns its number."""
        return self._row(name, terms, 0, right)

    def at_most(self, name: str, terms: Terms, right: float, *, further: tuple[Array, Array] | None = None) -> int:
        """Add the row `terms <= right`. `further`: variables, none of them in `terms`, and their coefficients."""
        row = self._row(name, terms, -1, right)
        if further is not None:
            self.entries.add(row, *further)
        return row

    def at_least(self, name: str, terms: Terms, right: float) -> int:
        return self._row(name, terms, 1, right)

    def equal_to_sum(self, name: str, variable: int, terms: tuple[Array, Array]) -> int:
        """Add a row by which `variable` equals a linear expression (variables, coefficients); returns its number."""
        row = self.equal(name, [(variable, 1.0)], 0.0)
        self.entries.add(row, terms[0], -terms[1])
        return row

    def transport(self, out: Sequence[Sequence[int]], into: Sequence[Sequence[int]], possible: Array) -> Array:
        """Add flows from each end in `out` to each end in `into`, where `possible`; returns their numbers, -1 for none.

        An end is a list of variables. Rows make the flows that leave or enter an end sum up to the sum of its
        variables.
        """
        numbers = np.full(possible.shape, -1)
        numbers[possible] = self.variables("f", int(possible.sum()))
        start = self._rows("out", len(out), 0, 0.0)
        end = self._rows("into", len(into), 0, 0.0)
        for rows, ends in ((start, out), (end, into)):
            for row, ones in zip(rows.tolist(), ends, strict=True):
                self.entries.add_row(row, dict.fromkeys(ones, -1.0))
        i, j = np.nonzero(possible)
        flows = numbers[i, j]
        self.entries.add(start[i], flows, 1.0)
        self.entries.add(end[j], flows, 1.0)
        self.records.flows.append(Flows(flows, start[i], end[j]))
        return numbers

    def implies(
        self, name: str, child: Array, parent: Array, terms: Sequence[tuple[int, float]] = (), right: float = 0.0
    ) -> None:
        """Add rows `parent - child + terms >= right`, one for each pair; they must be redundant if `child` is 0."""
        rows = self._rows(name, len(child), 1, right)
        self.entries.add(rows, parent, 1.0)
        self.entries.add(rows, child, -1.0)
        for variable, coefficient in terms:
            self.entries.add(rows, np.full(len(rows), variable), coefficient)
        self.records.implied_rows.append(Implied(rows, child, parent, not terms))

    def multiple(
        self, name: str, variables: Array, ones: Sequence[Array], times: Mapping[int, float], most: float
    ) -> None:
        """Add rows that bound each of `variables` as a product of `times` (an expression in counts) and a sum of
        `ones`, which is 0 or 1: at most `most` times the sum. In a box of counts, `Matrix.bound` tightens this to the
        least and the largest value of `times`, times the sum."""
        rows, floors = self._rows(name, len(variables), -1, 0.0), self._rows(name, len(variables), 1, 0.0)
        owner = np.repeat(np.arange(len(ones)), [len(factors) for factors in ones])
        all_ones = np.concatenate(ones)
        for lines, slope in ((rows, most), (floors, 0.0)):
            self.entries.add(lines, variables, 1.0)
            self.entries.add(lines[owner], all_ones, -slope)
        self.records.products.append(CountProducts(rows, floors, variables, all_ones, owner, dict(times), most))

    def matrix(self) -> Matrix:
        """The program as arrays; made anew if variables or rows were added since."""
        if self._matrix is None or (self._matrix.columns, self._matrix.lines) != (len(self.names), len(self.rows)):
            self._matrix = Matrix(self)
        self._matrix.cost = self.cost
        return self._matrix

    def wrong_products(self, values: Array) -> dict[int, float]:
        """For each count, the sum of the errors of its products: the distance of each z from t * s."""
        errors: dict[int, float] = {}
        products = self.matrix().products
        ones = np.bincount(products.owner, values[products.ones], minlength=len(products.rows))
        for kind, times in enumerate(products.times):
            of = products.kind == kind
            factor = sum(c * values[v] for v, c in times.items())
            error = float(np.abs(values[products.z[of]] - factor * ones[of]).sum())
            for count in times:
                errors[count] = errors.get(count, 0.0) + error
        return errors

    def relax(
        self,
        solver: str,
        time_limit: float,
        bounds: Bounds,
        entering: float = math.inf,
        *,
        everything: bool = False,
        first: Array | None = None,
        close: float | None = None,
        basis: Basis | None = None,
    ) -> Outcome:
        """The linear relaxation, or a bound of it if columns still enter after `entering` seconds; "stopped" if the
        time was too short. `everything`, `first`: as in `Relaxation`; `close`: how far the bound may be below the
        optimum (relative)."""
        if not is_highs(solver):
            return self._optimise(engine(solver, time_limit, 0.0), np.arange(len(self.names)), False, 0.0, bounds)
        at_once = close != math.inf and (close is not None or basis is None)
        relaxation = Relaxation(self.matrix(), everything=everything, at_once=at_once, first=first)
        return self._relaxed(relaxation, time_limit, bounds, entering, patient=True, close=close, basis=basis)

    def root(
        self,
        solver: str,
        time_limit: float,
        entering: float = math.inf,
        *,
        close: float | None = None,
        first: Array | None = None,
    ) -> Outcome:
        """The relaxation of the whole program, solved once and cached: the search starts from it, its dual values weigh
        what hides behind compute, and it shows which choices equal blocks would mix."""
        cached = self._root
        if cached is not None and len(cached[0]) == len(self.names) and np.array_equal(cached[0], self.cost):
            return cached[1]
        outcome = self.relax(solver, time_limit, {}, entering, close=close, first=first)
        if outcome.status == "optimal":
            self._root = self.cost, outcome
        return outcome

    def relax_again(
        self,
        parent: Outcome,
        time_limit: float,
        bounds: Bounds,
        *,
        cutoff: float = math.inf,
        from_last: bool = False,
    ) -> Outcome:
        """The relaxation in a box of its own, from the basis of its `parent` or (`from_last`) of the last answer;
        "closed" if its bound reached the cutoff. Without HiGHS it is solved from nothing."""
        if parent.relaxation is None:
            return self.relax("cbc", time_limit, bounds)
        relaxation, basis = parent.relaxation, None if from_last else parent.basis
        outcome = self._relaxed(relaxation, time_limit, bounds, time_limit / 2, basis=basis, cutoff=cutoff)
        if outcome.status == "stopped":  # its parent's bound and reduced costs hold
            return replace(parent, status="stopped", counts=bounds)
        return outcome

    def _relaxed(
        self,
        relaxation: Relaxation,
        time_limit: float,
        bounds: Bounds,
        entering: float,
        *,
        basis: Basis | None = None,
        patient: bool = False,
        close: float | None = None,
        cutoff: float = math.inf,
    ) -> Outcome:
        status = relaxation.solve(
            bounds, time_limit, entering, basis=basis, patient=patient, close=close, cutoff=cutoff
        )
        if status == "closed":
            return Outcome(status, NONE, math.inf, relaxation.objective, counts=bounds)
        if status != "optimal":
            return Outcome(status, NONE, math.inf, math.inf if status == "infeasible" else -math.inf)
        solved, value = relaxation, relaxation.objective
        return Outcome(
            "optimal", solved.values, value, value, solved.reduced, solved, bounds, solved.basis, solved.duals
        )

    def budget_binds(self, relaxed: Outcome) -> bool:
        """Whether the budget binds: whether the relaxation would cost less with a larger one."""
        if self.budget is None or not math.isfinite(self.upper[self.budget]) or not len(relaxed.reduced):
            return False
        return -relaxed.reduced[self.budget] * self.upper[self.budget] > INTEGRALITY * abs(relaxed.objective)

    def as_whole(self, relaxed: Outcome) -> Outcome | None:
        """The relaxation as a solution if all its integer variables are integral; else None."""
        integers = relaxed.values[self.matrix().integer]
        if relaxed.status != "optimal" or np.any(np.abs(integers - np.round(integers)) > INTEGRALITY):
            return None
        return replace(relaxed, objective=float(self.cost @ relaxed.values), bound=relaxed.objective)

    def integrate(
        self,
        solver: str,
        kept: Array,
        time_limit: float,
        gap: float,
        bounds: Bounds,
        *,
        cutoff: float = math.inf,
        nodes: int | None = None,
        heuristics: bool = False,
        aggregates: bool = True,
    ) -> Outcome:
        """The best integer solution in which all variables outside `kept` are 0, if it costs less than the `cutoff`: a
        solution or bound above the cutoff means nothing. For the other arguments see `engine`."""
        aggregates = aggregates and len(kept) > _MAX_COLUMNS_UNAGGREGATED
        run = engine(solver, time_limit, gap, cutoff, nodes, heuristics=heuristics, aggregates=aggregates)
        return self._optimise(run, kept, True, gap, bounds)

    def _optimise(self, run: Engine, kept: Array, integer: bool, gap: float, bounds: Bounds) -> Outcome:
        """Solve the program, or its relaxation, within `bounds` and with all variables outside `kept` at 0."""
        matrix = self.matrix()
        matrix.bound(bounds)
        return optimise(matrix.part(kept), run, integer=integer, gap=gap, bounds=bounds)

    def _row(self, name: str, terms: Terms, sense: int, right: float) -> int:
        self.rows.append((name, sense, right))
        self.entries.add_row(len(self.rows) - 1, terms)
        return len(self.rows) - 1

    def _rows(self, name: str, number: int, sense: int, right: float) -> Array:
        self.rows += [(name, sense, right)] * number
        return np.arange(len(self.rows) - number, len(self.rows))
