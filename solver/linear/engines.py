"""Integer programs (and relaxations by CBC) solved through pulp, fast also for a hundred thousand matrix entries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pulp

from autopar.arguments.checks import SOLVERS, solver_of
from autopar.solver.linear.clock import PACE, cpu_seconds
from autopar.solver.linear.highs import pass_to
from autopar.solver.linear.matrix import Part
from autopar.solver.linear.outcome import NONE, Bounds, Outcome

Engine: TypeAlias = pulp.LpSolver  # made by `engine`

# Heuristics of HiGHS that solve sub-MIPs; finding a solution without them is several times faster
_HEURISTICS = ("mip_heuristic_run_rins", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost")

_AGGREGATOR_BIT = 1 << 12  # the aggregator's bit in HiGHS's option presolve_rule_off

# pulp keeps the errors of solvers that cannot be imported; their tracebacks would keep the importer's frames alive
for _kind in vars(pulp.apis).values():
    if isinstance(_error := getattr(_kind, "err", None), BaseException):
        _error.__traceback__ = _error.__context__ = None

_VARIABLE_TYPES = pulp.LpContinuous, pulp.LpInteger
_STATUSES = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}


class ListedProblem(pulp.LpProblem):
    """A problem whose variables were all added first, so that pulp need not collect them from the rows three times.

    `part`: columns and rows as arrays, for HiGHS, which then needs no rows of pulp.
    """

    part: Part | None = None

    def variables(self) -> list[pulp.LpVariable]:
        return self._variables


class BulkHiGHS(pulp.HiGHS):
    """pulp's HiGHS, but the columns and rows of a `ListedProblem` are passed at once instead of one by one, and the
    time limit is in CPU seconds."""

    def buildSolverModel(self, lp: ListedProblem) -> None:  # pulp's name
        for i, variable in enumerate(lp.variables()):
            variable.index = i
        assert lp.part is not None
        pass_to(lp.solverModel, lp.part, integer=self.mip)

    def callSolver(self, lp: ListedProblem) -> None:  # pulp's name
        end = cpu_seconds() + self.timeLimit

        def stop(event: Any) -> None:
            if cpu_seconds() > end:
                event.interrupt()

        lp.solverModel.setOptionValue("time_limit", PACE.by_the_clock(self.timeLimit))
        lp.solverModel.cbMipInterrupt += stop
        with PACE.watched():
            super().callSolver(lp)

    def findSolutionValues(self, lp: ListedProblem) -> tuple[int, int]:  # pulp's name; these ends are new to it
        import highspy  # here, since CBC does without

        model, unknown = lp.solverModel, highspy.HighsModelStatus
        if model.getModelStatus() not in (unknown.kSolutionLimit, unknown.kInterrupt):
            return super().findSolutionValues(lp)
        if not math.isfinite(model.getObjectiveValue()):
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        for variable, value in zip(lp.variables(), model.getSolution().col_value, strict=True):
            variable.varValue = value
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


def is_highs(solver: str) -> bool:
    """Whether HiGHS is asked for and installed."""
    return solver == "highs" and bool(pulp.HiGHS(msg=False).available())


def engine_of(solver: str) -> str:
    """The solver of SOLVERS that is used for this name: CBC if HiGHS is not installed."""
    return "cbc" if solver in SOLVERS and not is_highs(solver) else solver


def engine(
    solver: str,
    time_limit: float,
    gap: float,
    cutoff: float = math.inf,
    nodes: int | None = None,
    *,
    heuristics: bool = False,
    aggregates: bool = True,
) -> Engine:
    """One of SOLVERS on one thread; CBC if HiGHS is not installed.

    HiGHS alone has a `cutoff` and a limit of `nodes` of its own branch and bound; with `heuristics` it also solves
    sub-MIPs; its presolve `aggregates` variables.

    Raises InputError for a name that is not in SOLVERS.
    """
    if is_highs(solver_of(solver)):
        options = {"random_seed": 0, "objective_bound": cutoff, **dict.fromkeys(_HEURISTICS, heuristics)}
        if cutoff < math.inf:  # with a restart (presolve), proving that nothing is below takes twice as long
            options["mip_allow_restart"] = False
        if nodes is not None:
            options["mip_max_nodes"] = nodes
        if not aggregates:
            options["presolve_rule_off"] = _AGGREGATOR_BIT
        return BulkHiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=gap, **options)
    with _as_of_pulp_3():
        return pulp.PULP_CBC_CMD(msg=False, threads=1, timeLimit=PACE.by_the_clock(time_limit), gapRel=gap)


@contextmanager
def _as_of_pulp_3() -> Iterator[None]:
    """Silence the warnings of pulp 3.3 about the API of pulp 4: pulp 3.0 to 3.2 lack it, and users can do nothing.

    By pulp's own switch: a filter of `warnings` would take longer than making the variables.
    """
    migration = getattr(pulp, "v4_migration", None)  # since pulp 3.3
    if migration is None or not migration.V4_MIGRATION_WARNINGS:
        yield
        return
    migration.set_v4_migration_warnings(False)
    try:
        yield
    finally:
        migration.set_v4_migration_warnings(True)


def optimise(part: Part, run: Engine, *, integer: bool, gap: float, bounds: Bounds) -> Outcome:
    """Solve the integer program, or the relaxation, of the columns of a part, all others being 0; `bounds`: those that
    were applied to the part's matrix."""
    with _as_of_pulp_3():
        return _optimised(part, run, integer=integer, gap=gap, bounds=bounds)


def _optimised(part: Part, run: Engine, *, integer: bool, gap: float, bounds: Bounds) -> Outcome:
    matrix, kept = part.matrix, part.columns
    problem = ListedProblem("plan", pulp.LpMinimize)
    lower = [None if low == -math.inf else low for low in matrix.lower[kept].tolist()]
    upper = [None if high == math.inf else high for high in matrix.upper[kept].tolist()]
    whole = (integer & matrix.integer[kept]).tolist()
    variables = [
        pulp.LpVariable(f"v{i}", low, high, _VARIABLE_TYPES[is_whole])
        for i, low, high, is_whole in zip(kept.tolist(), lower, upper, whole, strict=True)
    ]
    problem.addVariables(variables)
    prices = zip(variables, matrix.cost[kept].tolist(), strict=True)
    problem.setObjective(pulp.LpAffineExpression([(v, c) for v, c in prices if c]))
    if isinstance(run, BulkHiGHS):
        problem.part = part
    else:
        for number, (columns, values, least, most) in enumerate(part.lines()):
            sense = pulp.LpConstraintEQ if least == most else pulp.LpConstraintLE
            sense, right = (pulp.LpConstraintGE, least) if most == math.inf else (sense, most)
            row = pulp.LpAffineExpression([(variables[i], c) for i, c in zip(columns, values, strict=True)])
            problem.addConstraint(pulp.LpConstraint(row, sense, f"r{number}", right))
    problem.solve(run)
    status = _STATUSES.get(problem.sol_status)
    if status is None and problem.status == pulp.LpStatusInfeasible:
        return Outcome("infeasible", NONE, math.inf, math.inf)
    if status is None:
        bound = _bound(problem, math.inf, gap, "stopped", integer) if integer else -math.inf
        return Outcome("stopped", NONE, math.inf, bound)
    solution, reduced = np.zeros(matrix.columns), np.zeros(matrix.columns)
    solution[kept] = [v.varValue or 0.0 for v in variables]
    if not integer:
        reduced[kept] = [v.dj or 0.0 for v in variables]
    value = float(matrix.cost @ solution)
    return Outcome(status, solution, value, _bound(problem, value, gap, status, integer), reduced, counts=bounds)


def _bound(problem: pulp.LpProblem, value: float, gap: float, status: str, integer: bool) -> float:
    """A lower bound on all solutions, from an answer of this value and status."""
    model = getattr(problem, "solverModel", None)
    if not integer:
        return value
    if model is not None:
        return min(value, float(model.getInfo().mip_dual_bound))
    return value * (1 - gap) if status == "optimal" else 0.0
