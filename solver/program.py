"""A mixed-integer linear program as plain lists, and its solution by pulp: the one file that imports pulp."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pulp

from autopar.errors import AutoparError, InputError

Terms = Iterable[tuple[int, float]]  # (variable, coefficient)

SOLVERS = ("highs", "cbc")


@dataclass(frozen=True)
class Outcome:
    """What the solver found: "optimal", "feasible" (stopped early) or "infeasible"; `bound` is proven."""

    status: str
    values: Sequence[float]
    objective: float
    bound: float
    seconds: float


@dataclass
class Program:
    """Minimise `cost @ x` over `lower <= x <= upper` and rows; some variables are integers."""

    names: list[str] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float | None] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    cost: dict[int, float] = field(default_factory=dict)
    rows: list[tuple[str, dict[int, float], int, float]] = field(default_factory=list)

    def variable(self, name: str, *, lower: float = 0.0, upper: float | None = 1.0, integer: bool = False) -> int:
        """A new variable, continuous in [0, 1] unless said; returns its number."""
        self.names.append(name)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.names) - 1

    def pay(self, variable: int, cost: float) -> None:
        """Add to a variable's coefficient in the objective."""
        if cost:
            self.cost[variable] = self.cost.get(variable, 0.0) + cost

    def equal(self, name: str, terms: Terms, right: float) -> None:
        self.rows.append((name, _sum(terms), 0, right))

    def at_most(self, name: str, terms: Terms, right: float) -> None:
        self.rows.append((name, _sum(terms), -1, right))

    def at_least(self, name: str, terms: Terms, right: float) -> None:
        self.rows.append((name, _sum(terms), 1, right))

    def solve(self, solver: str = "highs", *, time_limit: float = 60.0, gap: float = 1e-4) -> Outcome:
        """Solve on one thread to relative `gap` or until `time_limit` seconds; the same program gives the same answer."""
        problem = pulp.LpProblem("plan", pulp.LpMinimize)
        variables = [
            pulp.LpVariable(f"v{i}", low, up, pulp.LpInteger if whole else pulp.LpContinuous)
            for i, (low, up, whole) in enumerate(zip(self.lower, self.upper, self.integer, strict=True))
        ]
        objective = pulp.LpAffineExpression([(variables[i], c) for i, c in self.cost.items()])
        problem.setObjective(objective)
        senses = {-1: pulp.LpConstraintLE, 0: pulp.LpConstraintEQ, 1: pulp.LpConstraintGE}
        for number, (_, terms, sense, right) in enumerate(self.rows):
            expression = pulp.LpAffineExpression([(variables[i], c) for i, c in terms.items()])
            problem.addConstraint(pulp.LpConstraint(expression, senses[sense], f"r{number}", right))
        problem.addVariables(variables)
        engine = self._engine(solver, time_limit, gap)
        start = time.process_time()
        problem.solve(engine)
        seconds = time.process_time() - start
        solved = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}
        status = solved.get(problem.sol_status)
        if status is None:
            if problem.status == pulp.LpStatusInfeasible:
                return Outcome("infeasible", (), float("inf"), float("inf"), seconds)
            raise AutoparError(f"the solver found no plan within {time_limit:g} seconds: give it more time_limit")
        values = [v.varValue if v.varValue is not None else low for v, low in zip(variables, self.lower, strict=True)]
        value = sum(c * values[i] for i, c in self.cost.items())
        return Outcome(status, values, value, self._bound(problem, value, gap, status), seconds)

    def _engine(self, solver: str, time_limit: float, gap: float) -> pulp.LpSolver:
        if solver == "highs" and pulp.HiGHS(msg=False).available():
            return pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=gap, random_seed=0)
        if solver in SOLVERS:
            return pulp.PULP_CBC_CMD(msg=False, threads=1, timeLimit=time_limit, gapRel=gap)
        raise InputError(f"solver {solver!r} is unknown: use one of {', '.join(SOLVERS)}")

    def _bound(self, problem: pulp.LpProblem, value: float, gap: float, status: str) -> float:
        model = getattr(problem, "solverModel", None)
        if model is not None and any(self.integer):
            return min(value, float(model.getInfo().mip_dual_bound))
        return value * (1 - gap) if status == "optimal" else 0.0


def _sum(terms: Terms) -> dict[int, float]:
    found: dict[int, float] = {}
    for variable, coefficient in terms.items() if isinstance(terms, Mapping) else terms:
        found[variable] = found.get(variable, 0.0) + coefficient
    return found
