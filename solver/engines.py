"""HiGHS and CBC through pulp, quick where a program has a hundred thousand entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pulp

from autopar.argument_checks import SOLVERS, solver_of
from autopar.solver.matrix import Part

_HEURISTICS = ("mip_heuristic_run_rins", "mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost")
# they solve smaller programs within this one, and take several times as long as finding a solution without

_AGGREGATOR = 1 << 12  # its bit among HiGHS's rules of presolve


class ListedProblem(pulp.LpProblem):
    """A problem to which all variables were added at first: pulp need not look for them, thrice, in its rows.

    `part`: for HiGHS, its columns and rows as arrays, in place of pulp's rows.
    """

    part: Part | None = None

    def variables(self) -> list[pulp.LpVariable]:
        return self._variables


class BulkHiGHS(pulp.HiGHS):
    """pulp's HiGHS, which is given the columns and rows of a `ListedProblem` in one piece instead of one by one."""

    def buildSolverModel(self, lp: ListedProblem) -> None:  # pulp's name
        for i, variable in enumerate(lp.variables()):
            variable.index = i
        assert lp.part is not None
        pass_to(lp.solverModel, lp.part, integer=self.mip)

    def findSolutionValues(self, lp: ListedProblem) -> tuple[int, int]:  # pulp's name; it does not know this end
        import highspy  # here, since CBC does without

        model = lp.solverModel
        if model.getModelStatus() != highspy.HighsModelStatus.kSolutionLimit:
            return super().findSolutionValues(lp)
        if not math.isfinite(model.getObjectiveValue()):
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        for variable, value in zip(lp.variables(), model.getSolution().col_value, strict=True):
            variable.varValue = value
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


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


def is_highs(solver: str) -> bool:
    """Whether HiGHS is asked for and can be had."""
    return solver == "highs" and bool(pulp.HiGHS(msg=False).available())


def engine_of(solver: str) -> str:
    """The one of SOLVERS that answers for this one: CBC where HiGHS cannot be had."""
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
) -> pulp.LpSolver:
    """One of SOLVERS on one thread; CBC where HiGHS cannot be had. HiGHS looks no further than the `cutoff`, and at no
    more than so many nodes of its own search; with `heuristics` it looks for solutions in smaller programs too; its
    presolve `aggregates` variables.

    Raises InputError for any other name.
    """
    if is_highs(solver_of(solver)):
        options = {"random_seed": 0, "objective_bound": cutoff, **dict.fromkeys(_HEURISTICS, heuristics)}
        if cutoff < math.inf:  # to prove that there is nothing below takes twice as long with another presolve between
            options["mip_allow_restart"] = False
        if nodes is not None:
            options["mip_max_nodes"] = nodes
        if not aggregates:
            options["presolve_rule_off"] = _AGGREGATOR
        return BulkHiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=gap, **options)
    return pulp.PULP_CBC_CMD(msg=False, threads=1, timeLimit=time_limit, gapRel=gap)
