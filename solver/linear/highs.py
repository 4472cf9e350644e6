"""A HiGHS session that holds part of a linear program and solves it repeatedly, with more columns and rows or with
other bounds, each time from a basis (warm start)."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import numpy as np

from autopar.solver.linear.clock import PACE, cpu_seconds
from autopar.solver.linear.iteration_limits import IterationLimits
from autopar.solver.linear.matrix import Matrix, Part
from autopar.solver.linear.terms import Array

_LIMITS = IterationLimits()
_MIN_ROWS_PRESOLVE = 30_000  # rows from which presolve pays: it saves half of DeepSeek-V3's iterations and more
Start = Literal["warm", "unperturbed"]
Basis = tuple[Array, Array, Array, Array]  # columns and their basis status, rows and their basis status
# Model statuses as HiGHS spells them
CUTOFF_REACHED = "Bound on objective reached"
ITERATION_LIMIT, TIME_LIMIT = "Iteration limit reached", "Time limit reached"
_NO_RESULT = "Unknown", "Not Set"  # HiGHS came to no result
_MAX_COLD_STARTS = 4  # cold starts that end so before this is accepted as the answer
_WARM_UPDATES, _COLD_UPDATES = 100, 5_000
"""Basis updates until HiGHS factorises anew, in a warm and in a cold start. After a warm start from a basis that a box
makes infeasible, small pivots can lead to a singular basis, which HiGHS then examines at length (28 seconds with 7,000
rows); frequent factorisation avoids that."""
_RAY_TOLERANCE = 1e-9  # entries of a dual ray below this part of its largest one count as 0


class HighsSession:
    """HiGHS with the columns and rows that it was passed last, and the last known basis status of all columns and rows.

    A question is one call of `run`.
    """

    def __init__(self, matrix: Matrix) -> None:
        import highspy  # here, since CBC does without

        self._highspy, self._matrix = highspy, matrix
        self._engine: Any = highspy.Highs()
        # with few rows presolve takes longer than it saves; with fixed counts it once did not end
        for option, value in (("presolve", "off"), ("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self._engine.setOptionValue(option, value)
        self._column_status = np.empty(matrix.columns, dtype=object)
        self._row_status = np.empty(matrix.lines, dtype=object)
        self._has_basis = False  # whether there is a basis to start from
        self.start_from(None)
        self.basis: Basis | None = None  # of the last optimum
        self._cold_start_iterations = 0  # of the last cold start
        self._iterations, self._end = 0, 0.0  # of the current question: iterations so far, and CPU second of its end
        self._columns, self._rows = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._passed: tuple[Array, ...] | None = None  # what HiGHS was passed, if it is at a basis of that
        self._starts_elsewhere = False  # whether the next question starts from a basis other than the one HiGHS is at

    def start_from(self, basis: Basis | None) -> None:
        """Start the next question from this basis; columns that it lacks are at their lower bound, rows basic."""
        status = self._highspy.HighsBasisStatus
        self._column_status[:], self._row_status[:] = status.kLower, status.kBasic
        if basis is not None:
            columns, of_columns, rows, of_rows = basis
            self._column_status[columns], self._row_status[rows] = of_columns, of_rows
            self._has_basis, self._starts_elsewhere = True, basis is not self.basis

    def run(
        self,
        inside: Array,
        time_limit: float,
        *,
        patient: bool,
        cutoff: float = math.inf,
        start: Start = "warm",
    ) -> str:
        """Solve with these columns; returns HiGHS's model status.

        `start`: "warm" starts from the last basis, or cold if there is none; "unperturbed" starts cold and without cost
        perturbation, for a limited number of iterations. A question that is not `patient` has lower limits of
        iterations.
        """
        is_warm = self._has_basis and start != "unperturbed"
        self._prepare(inside, cutoff, is_warm)
        self._iterations, self._end = 0, cpu_seconds() + time_limit
        if start == "unperturbed":
            status = self._start_unperturbed()
        elif not is_warm:
            self._perturb_costs(True)
            status = self._start_cold()
        else:
            status = self._start_warm(patient)
            if status in (ITERATION_LIMIT, *_NO_RESULT):  # it takes too long or comes to no result: start cold
                is_warm, self._iterations = False, 0
                self._engine.clearSolver()
                self._engine.setOptionValue("simplex_update_limit", _COLD_UPDATES)
                status = self._start_cold() if patient else self._start_cold_by_steps(cutoff)
        if not is_warm:
            self._cold_start_iterations = self._iterations
        self._keep_basis(status, is_warm)
        return status

    def _prepare(self, inside: Array, cutoff: float, is_warm: bool) -> None:
        """Pass to HiGHS what the question needs: columns, rows, cutoff and, for a warm start, the basis."""
        had_same = self._pass(inside)
        self._engine.setOptionValue("objective_bound", cutoff)
        self._engine.setOptionValue("simplex_update_limit", _WARM_UPDATES if is_warm else _COLD_UPDATES)
        if is_warm and (self._starts_elsewhere or not had_same):
            start_basis = self._highspy.HighsBasis()
            start_basis.col_status = self._column_status[self._columns].tolist()
            start_basis.row_status = self._row_status[self._rows].tolist()
            start_basis.valid = start_basis.alien = True  # HiGHS repairs a basis of the wrong size
            self._engine.setBasis(start_basis)

    def _keep_basis(self, status: str, is_warm: bool) -> None:
        """Keep the basis at which HiGHS ended, for the next warm start; none after a warm start that was cut off."""
        ended = status in ("Optimal", "Infeasible") or (status == CUTOFF_REACHED and not is_warm)
        basis = self._engine.getBasis() if ended else None
        self._passed, self._starts_elsewhere = self._passed if ended else None, False
        if basis is not None and basis.valid:
            end_basis = self._columns, np.array(basis.col_status), self._rows, np.array(basis.row_status)
            self._column_status[self._columns], self._row_status[self._rows] = end_basis[1], end_basis[3]
            self._has_basis = True
            self.basis = end_basis if status == "Optimal" else self.basis

    def _perturb_costs(self, perturbed: bool) -> None:
        """Switch HiGHS's cost perturbation on or off.

        With perturbation, a cold start takes a third of the time if a budget binds, but a warm start takes three times
        as long, and HiGHS does not stop at a cutoff.
        """
        self._engine.setOptionValue("dual_simplex_cost_perturbation_multiplier", float(perturbed))

    def answer(self) -> tuple[float, Array, Array]:
        """The optimum, the values of all columns and the dual values of all rows; 0 for those that HiGHS lacks."""
        solution = self._engine.getSolution()
        values, duals = np.zeros(self._matrix.columns), np.zeros(self._matrix.lines)
        values[self._columns], duals[self._rows] = solution.col_value, solution.row_dual
        return float(self._engine.getInfo().objective_function_value), values, duals

    def ray(self) -> Array | None:
        """A Farkas proof of infeasibility: dual values (scaled to at most 1) by which the sum of the rows cannot be met
        by any values of the columns; None if HiGHS has none that proves it."""
        _, has_ray, ray = self._engine.getDualRay()
        if not has_ray or not np.any(ray):
            return None
        duals = np.zeros(self._matrix.lines)
        duals[self._rows] = np.where(np.abs(ray) > _RAY_TOLERANCE * np.abs(ray).max(), ray, 0.0) / np.abs(ray).max()
        return duals if self._proves(duals) else None

    def _proves(self, duals: Array) -> bool:
        """Whether the sum of the rows, each times its dual value, requires more than the columns' bounds allow."""
        matrix, rows, columns = self._matrix, self._rows, self._columns
        sums = np.bincount(matrix.column, duals[matrix.row] * matrix.value, minlength=matrix.columns)[columns]
        required = np.where(duals[rows] > 0, matrix.least[rows], matrix.most[rows])
        extreme = np.where(sums > 0, matrix.upper[columns], matrix.lower[columns])
        used, summed = duals[rows] != 0, np.abs(sums) > _RAY_TOLERANCE
        return bool(required[used] @ duals[rows][used] > extreme[summed] @ sums[summed])

    def _start_warm(self, patient: bool) -> str:
        """Start from the basis that HiGHS was given."""
        self._perturb_costs(False)
        return self._solve(_LIMITS.warm(len(self._rows), self._cold_start_iterations, patient=patient))

    def _start_unperturbed(self) -> str:
        """Cold start without cost perturbation, for few iterations; if HiGHS comes to no result, start as usual."""
        self._perturb_costs(False)
        status = self._solve(_LIMITS.by_rows(_LIMITS.unperturbed_by_rows, len(self._rows)))
        if status in _NO_RESULT:
            self._engine.clearSolver()
            status = self._start_cold()
        return status

    def _start_cold(self) -> str:
        """Cold start: with cost perturbation first; if that takes too long, go on without it, and so on in turn.

        With perturbation HiGHS mostly takes a third to half as many iterations as there are rows. But sometimes it has
        the optimum, perturbs the costs again to prove it, and does not come to an end: for DeepSeek-V3 it then took
        100,000 iterations, and 1,000 without perturbation.

        If HiGHS comes to no result, it starts anew with the other setting, later also with another random seed: for an
        infeasible program of 2,066 columns (an MLP) it had no result after 1,376 iterations, and proved infeasibility
        after 1,254 with the other setting.
        """
        if len(self._rows) >= _MIN_ROWS_PRESOLVE:
            status = self._start_presolved()
            if status in ("Optimal", TIME_LIMIT):
                return status  # if presolve finds infeasibility, there is no Farkas proof: solve without
            self._engine.clearSolver()
        failures = 0
        for perturbed in itertools.cycle((True, False)):
            self._perturb_costs(perturbed)
            self._engine.setOptionValue("random_seed", failures // 2)
            status = self._solve(_LIMITS.by_rows(_LIMITS.perturbed_by_rows, len(self._rows)))
            failures += status in _NO_RESULT
            if status in _NO_RESULT and failures < _MAX_COLD_STARTS:
                self._engine.clearSolver()
            elif status != ITERATION_LIMIT:
                break
        self._engine.setOptionValue("random_seed", 0)
        return status

    def _start_presolved(self) -> str:
        self._engine.setOptionValue("presolve", "on")
        status = self._solve(_LIMITS.by_rows(_LIMITS.perturbed_by_rows, len(self._rows)))
        self._engine.setOptionValue("presolve", "off")
        return status

    def _start_cold_by_steps(self, cutoff: float) -> str:
        """Cold start that checks the cutoff between steps, since HiGHS itself does not with cost perturbation.

        Without the check, an infeasible box of counts took 32 seconds on the way to an objective of 5e11.
        """
        self._perturb_costs(True)
        for iterations in _LIMITS.cold_steps:
            status = self._solve(iterations)
            if status == ITERATION_LIMIT and float(self._engine.getInfo().objective_function_value) > cutoff:
                return CUTOFF_REACHED
            if status != ITERATION_LIMIT:
                break
        return status

    def _solve(self, iterations: int) -> str:
        """Go on for so many iterations or until the question's CPU seconds are used up; HiGHS's own time limit, which
        counts wall-clock time, is renewed until then."""
        while (remaining := self._end - cpu_seconds()) > 0 and iterations > 0:
            self._engine.setOptionValue("time_limit", float(self._engine.getRunTime()) + PACE.by_the_clock(remaining))
            self._engine.setOptionValue("simplex_iteration_limit", iterations)
            with PACE.watched():
                self._engine.run()
            done = int(self._engine.getInfo().simplex_iteration_count)
            iterations, self._iterations = iterations - done, self._iterations + done
            status = str(self._engine.modelStatusToString(self._engine.getModelStatus()))
            if status != TIME_LIMIT:
                return status
        return TIME_LIMIT if remaining <= 0 else ITERATION_LIMIT

    def _pass(self, inside: Array) -> bool:
        """Pass these columns to HiGHS; returns whether it had the same columns, rows and values, so that only bounds
        change. Then HiGHS goes on from its last basis, which it has factorised: a basis is valid for any bounds."""
        part, matrix = Part(self._matrix, inside, self._matrix.awake(inside)), self._matrix
        self._columns, self._rows = part.columns, part.rows
        passed = part.columns, part.rows, matrix.value[part.entries], matrix.cost[part.columns]
        had_same = self._passed is not None and all(map(np.array_equal, self._passed, passed))
        if had_same:
            columns, rows = np.arange(len(part.columns), dtype=np.int32), np.arange(len(part.rows), dtype=np.int32)
            lower, upper = matrix.lower[part.columns], matrix.upper[part.columns]
            self._engine.changeColsBounds(len(columns), columns, lower, upper)
            self._engine.changeRowsBounds(len(rows), rows, matrix.least[part.rows], matrix.most[part.rows])
        else:
            pass_to(self._engine, part, integer=False)
        self._passed = passed
        return had_same


def pass_to(highs: Any, part: Part, *, integer: bool) -> None:
    """Pass some columns and rows of a program to HiGHS, as arrays that it reads without conversion to Python lists."""
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
        (matrix.integer[columns] & integer).astype(np.int32),  # HiGHS's variable types: 0 continuous, 1 integer
    )
