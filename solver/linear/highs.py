"""HiGHS holding part of a program: solved again and again with more columns and rows, or other bounds, from a basis."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np

from autopar.solver.linear.clock import PACE, cpu_seconds
from autopar.solver.linear.matrix import Matrix, Part
from autopar.solver.linear.terms import Array

_ITERATIONS = 1_500, 1.0  # of the simplex method from a basis, at least and as a part of a start from nothing
_OF_ANOTHER = 0.3  # as a part of the rows, from the basis of another program, where nothing was solved before
_IN_A_BOX = 0.25  # the part where counts have other bounds: these take about as long as a start from nothing
_ANEW = 10_000, 10_000, 10_000  # and of such a start, where it is not the first
_OF_PLAIN = 0.25  # of a start with the costs as they are, as a part of the rows: where it takes more, it was in vain
_TURN = 0.6  # of a start from nothing, of the rows, until the costs that HiGHS changes are as they are, and back
_PRESOLVED = 30_000  # rows from which presolve saves more than it takes: half of DeepSeek-V3's iterations and more
Start = Literal["basis", "plain"]
Basis = tuple[Array, Array, Array, Array]  # columns and how they stand, rows and how they stand
# HiGHS's words
ENOUGH, LIMIT, TIME = "Bound on objective reached", "Iteration limit reached", "Time limit reached"
_WITHOUT_AN_END = "Unknown", "Not Set"  # and where it does not come to one
_TRIES = 4  # from nothing, until that is believed
_UPDATES = 100, 5_000
"""Of a basis until it is factorised anew, from a basis and from nothing. Small pivots from a basis that a box makes
infeasible end in one that is singular, which HiGHS then examines at length: 28 seconds with 7,000 rows."""
_NOTHING = 1e-9  # of a proof's largest number


class HighsSession:
    """HiGHS with the columns and rows that it was given last, and how all columns and rows stood in their bases."""

    def __init__(self, matrix: Matrix) -> None:
        import highspy  # here, since CBC does without

        self._highspy, self._matrix = highspy, matrix
        self._engine: Any = highspy.Highs()
        # presolve takes longer than it saves where there are few rows, once without end where counts are fixed
        for option, value in (("presolve", "off"), ("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self._engine.setOptionValue(option, value)
        self._column_status = np.empty(matrix.columns, dtype=object)
        self._row_status = np.empty(matrix.lines, dtype=object)
        self._stands = False  # whether there is a basis to start from
        self.stand(None)
        self.basis: Basis | None = None  # of the last answer
        self._anew = 0  # iterations of the last start from nothing
        self._iterations, self._end = 0, 0.0  # of a question: those that it has taken, and when it ends
        self._columns, self._rows = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._held: tuple[Array, ...] | None = None  # what HiGHS was passed, if it stands at a basis of it
        self._moved = False  # whether the next question starts from another basis than that

    def stand(self, basis: Basis | None) -> None:
        """Start the next question from this basis; columns that it lacks are 0, and rows that it lacks say nothing."""
        status = self._highspy.HighsBasisStatus
        self._column_status[:], self._row_status[:] = status.kLower, status.kBasic
        if basis is not None:
            columns, of_columns, rows, of_rows = basis
            self._column_status[columns], self._row_status[rows] = of_columns, of_rows
            self._stands, self._moved = True, basis is not self.basis

    def run(
        self,
        inside: Array,
        time_limit: float,
        *,
        patient: bool,
        cutoff: float = math.inf,
        start: Start = "basis",
    ) -> str:
        """Solve with these columns; HiGHS's word for how it ended.

        `start`: from the last basis, or from nothing if there is none; or from nothing with the costs as they are, for
        some iterations (`plain`). Only a `patient` question may take more than some iterations from a basis.
        """
        first = start == "plain" or not self._stands
        stays = self._pass(inside) and not first
        self._engine.setOptionValue("objective_bound", cutoff)
        self._engine.setOptionValue("simplex_update_limit", _UPDATES[first])
        if not first and (self._moved or not stays):
            start_basis = self._highspy.HighsBasis()
            start_basis.col_status = self._column_status[self._columns].tolist()
            start_basis.row_status = self._row_status[self._rows].tolist()
            start_basis.valid = start_basis.alien = True  # HiGHS mends one of too few or too many
            self._engine.setBasis(start_basis)
        self._change_costs(first and start != "plain")
        part = _ITERATIONS[1] if patient else _IN_A_BOX
        known = part * self._anew if self._anew or not patient else _OF_ANOTHER * len(self._rows)
        most = max(_ITERATIONS[0], int(known))
        if start == "plain":
            most = max(_ITERATIONS[0], int(_OF_PLAIN * len(self._rows)))
        self._iterations, self._end = 0, cpu_seconds() + time_limit
        status = self._solve_anew() if first and start != "plain" else self._solve(most)
        if status in (LIMIT, *_WITHOUT_AN_END) and not first:
            first, self._iterations = True, 0  # where it needs more, or is lost from this basis, it starts from nothing
            self._engine.clearSolver()
            self._engine.setOptionValue("simplex_update_limit", _UPDATES[True])
            status = self._solve_anew() if patient else self._solve_by_steps(cutoff)
        elif status in _WITHOUT_AN_END and start == "plain":
            self._engine.clearSolver()
            status = self._solve_anew()
        if first:
            self._anew = self._iterations
        ended = status in ("Optimal", "Infeasible", ENOUGH if first else "")
        basis = self._engine.getBasis() if ended else None  # not where it is cut off
        self._held, self._moved = self._held if ended else None, False
        if basis is not None and basis.valid:
            found = self._columns, np.array(basis.col_status), self._rows, np.array(basis.row_status)
            self._column_status[self._columns], self._row_status[self._rows] = found[1], found[3]
            self._stands = True
            self.basis = found if status == "Optimal" else self.basis
        return status

    def _change_costs(self, changed: bool) -> None:
        """Whether HiGHS may change the costs a little.

        Then it takes a third of the time from nothing where a budget binds, and thrice as long from a basis, and does
        not stop at a cutoff.
        """
        self._engine.setOptionValue("dual_simplex_cost_perturbation_multiplier", float(changed))

    def answer(self) -> tuple[float, Array, Array]:
        """The optimum, the values of all columns and the dual values of all rows, 0 for what is not there."""
        solution = self._engine.getSolution()
        values, duals = np.zeros(self._matrix.columns), np.zeros(self._matrix.lines)
        values[self._columns], duals[self._rows] = solution.col_value, solution.row_dual
        return float(self._engine.getInfo().objective_function_value), values, duals

    def ray(self) -> Array | None:
        """Of an infeasible program: duals (largest 1) with which no values of its columns meet the sum of its rows."""
        _, known, ray = self._engine.getDualRay()
        if not known or not np.any(ray):
            return None
        duals = np.zeros(self._matrix.lines)
        duals[self._rows] = np.where(np.abs(ray) > _NOTHING * np.abs(ray).max(), ray, 0.0) / np.abs(ray).max()
        return duals if self._proves(duals) else None

    def _proves(self, duals: Array) -> bool:
        """Whether the sum of the rows, each times its dual, wants more than the columns can give."""
        matrix, rows, columns = self._matrix, self._rows, self._columns
        sums = np.bincount(matrix.column, duals[matrix.row] * matrix.value, minlength=matrix.columns)[columns]
        wanted = np.where(duals[rows] > 0, matrix.least[rows], matrix.most[rows])
        given = np.where(sums > 0, matrix.upper[columns], matrix.lower[columns])
        some, most = duals[rows] != 0, np.abs(sums) > _NOTHING
        return bool(wanted[some] @ duals[rows][some] > given[most] @ sums[most])

    def _solve_anew(self) -> str:
        """Solve from nothing, with changed costs and, from where these took too long, with the costs as they are.

        The former take a third to half as many iterations as there are rows. Or HiGHS has the optimum, changes the
        costs anew to prove it, and never comes to an end: DeepSeek-V3's took 100,000 then, and 1,000 without.

        Where it is lost it begins anew, with the other costs, then with other random numbers too: of 2,066 columns of
        an MLP, which had no solution, it knew nothing after 1,376 iterations, and that after 1,254 the other way.
        """
        if len(self._rows) >= _PRESOLVED:
            status = self._solve_presolved()
            if status in ("Optimal", TIME):
                return status  # but of what presolve finds to have no solution there is no proof
            self._engine.clearSolver()
        lost = 0
        for changed in itertools.cycle((True, False)):
            self._change_costs(changed)
            self._engine.setOptionValue("random_seed", lost // 2)
            status = self._solve(max(_ITERATIONS[0], int(_TURN * len(self._rows))))
            lost += status in _WITHOUT_AN_END
            if status in _WITHOUT_AN_END and lost < _TRIES:
                self._engine.clearSolver()
            elif status != LIMIT:
                break
        self._engine.setOptionValue("random_seed", 0)
        return status

    def _solve_presolved(self) -> str:
        self._engine.setOptionValue("presolve", "on")
        status = self._solve(max(_ITERATIONS[0], int(_TURN * len(self._rows))))
        self._engine.setOptionValue("presolve", "off")
        return status

    def _solve_by_steps(self, cutoff: float) -> str:
        """Solve from nothing, and look at the cutoff now and then: HiGHS does not, with costs that it has changed.

        On the way to an objective of 5e11 a box of counts that has no solution took it 32 seconds.
        """
        self._change_costs(True)
        for most in _ANEW:
            status = self._solve(most)
            if status == LIMIT and float(self._engine.getInfo().objective_function_value) > cutoff:
                return ENOUGH
            if status != LIMIT:
                break
        return status

    def _solve(self, iterations: int) -> str:
        """Go on for so many iterations, whatever HiGHS's clock says, until the question's CPU seconds are over."""
        while (left := self._end - cpu_seconds()) > 0 and iterations > 0:
            self._engine.setOptionValue("time_limit", float(self._engine.getRunTime()) + PACE.by_the_clock(left))
            self._engine.setOptionValue("simplex_iteration_limit", iterations)
            with PACE.watched():
                self._engine.run()
            taken = int(self._engine.getInfo().simplex_iteration_count)
            iterations, self._iterations = iterations - taken, self._iterations + taken
            status = str(self._engine.modelStatusToString(self._engine.getModelStatus()))
            if status != TIME:
                return status
        return TIME if left <= 0 else LIMIT

    def _pass(self, inside: Array) -> bool:
        """Give HiGHS these columns; whether it had them, and all that changes is bounds.

        Then it can go on from its last basis, which suits any bounds, and has it factorised.
        """
        part, matrix = Part(self._matrix, inside, self._matrix.awake(inside)), self._matrix
        self._columns, self._rows = part.columns, part.rows
        passed = part.columns, part.rows, matrix.value[part.entries], matrix.cost[part.columns]
        stays = self._held is not None and all(map(np.array_equal, self._held, passed))
        if stays:
            columns, rows = np.arange(len(part.columns), dtype=np.int32), np.arange(len(part.rows), dtype=np.int32)
            lower, upper = matrix.lower[part.columns], matrix.upper[part.columns]
            self._engine.changeColsBounds(len(columns), columns, lower, upper)
            self._engine.changeRowsBounds(len(rows), rows, matrix.least[part.rows], matrix.most[part.rows])
        else:
            pass_to(self._engine, part, integer=False)
        self._held = passed
        return stays


def pass_to(highs: Any, part: Part, *, integer: bool) -> None:
    """Give HiGHS some columns and rows of a program, as arrays that it reads without Python's lists between."""
    import highspy  # here, since CBC does without

    matrix, columns, rows = part.matrix, part.columns, part.rows
    highs.passModel(
        len(columns),
        len(rows),
        len(part.entries),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        matrix.cost[columns],
        matrix.lower[columns],
        matrix.upper[columns],
        matrix.least[rows],
        matrix.most[rows],
        (np.cumsum(part.lengths) - part.lengths).astype(np.int32),
        part.index.astype(np.int32),
        matrix.value[part.entries],
        (matrix.integer[columns] & integer).astype(np.int32),  # HiGHS's numbers: 0 continuous, 1 integer
    )
