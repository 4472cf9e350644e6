"""A mixed-integer linear program as plain lists, and its solution by pulp: the one file that imports pulp."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pulp

from autopar.errors import AutoparError, InputError

Terms = Iterable[tuple[int, float]]  # (variable, coefficient)

SOLVERS = ("highs", "cbc")
_SENSES = {-1: pulp.LpConstraintLE, 0: pulp.LpConstraintEQ, 1: pulp.LpConstraintGE}
_MARGIN = 0.015  # the first margin of reduced costs, relative
_NARROW = 0.008  # the same where branches were solved
_BRANCHES = 6  # relaxations solved again for branches


@dataclass(frozen=True)
class Outcome:
    """What the solver found: "optimal", "feasible" (stopped early) or "infeasible"; `bound` is proven."""

    status: str
    values: Sequence[float]
    objective: float
    bound: float
    seconds: float
    reduced: Sequence[float] = ()  # reduced costs, of a relaxation
    engine: Any = None  # the solver that holds a relaxation's basis, HiGHS alone
    columns: Sequence[int] = ()  # the number that it has for each variable
    fixed: Mapping[int, float] = field(default_factory=dict)  # the branch in which this holds


@dataclass
class Program:
    """Minimise `cost @ x` over `lower <= x <= upper` and rows; some variables are integers."""

    names: list[str] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float | None] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)  # 0 or at least 1 in every integer solution
    cost: dict[int, float] = field(default_factory=dict)
    rows: list[tuple[str, dict[int, float], int, float]] = field(default_factory=list)
    early: list[int] = field(default_factory=list)  # 0 or 1, and decided before all others: see `solve`
    branch: bool = True  # whether they are

    def variable(
        self, name: str, *, lower: float = 0.0, upper: float | None = 1.0, integer: bool = False, whole: bool = True
    ) -> int:
        """A new variable, continuous in [0, 1] unless said; returns its number.

        `whole`: where the integers are integers, this one is 0 or at least 1 by itself.
        """
        self.names.append(name)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        self.whole.append(whole)
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
        """Solve on one thread to relative `gap` or until `time_limit` seconds; the same program gives the same answer.

        First the linear relaxation, in each branch b of the variables that are decided early. Its optimum L_b is a
        bound there, and a solution of the branch in which a variable of reduced cost d_b is 1 costs at least
        L_b + d_b. Up to a limit, min L_b + margin, only branches with L_b below it and variables with some L_b + d_b
        below it are needed: the rest is left out. What is found then is compared with the limit, and with a wider
        margin the rest is repeated if it has to be.
        """
        start = time.process_time()
        everything = range(len(self.names))
        relaxed = self._optimise(solver, everything, False, time_limit, gap)
        if relaxed.status == "infeasible" or not any(self.integer):
            return relaxed
        leaves = self._branches(relaxed)
        if not leaves:
            return replace(relaxed, status="infeasible", values=(), objective=math.inf, bound=math.inf)
        low = min(leaf.objective for leaf in leaves)
        margin = max(abs(low) * max(gap, _NARROW if len(leaves) > 1 or leaves[0].fixed else _MARGIN), 1e-6)
        while True:
            left = max(1.0, time_limit - (time.process_time() - start))
            near_leaves = [leaf for leaf in leaves if leaf.objective <= low + margin]
            kept = self._kept(near_leaves, low + margin)
            fixed = near_leaves[0].fixed if len(near_leaves) == 1 else {}
            found = self._optimise(solver, kept, True, left, gap, fixed)
            complete = len(kept) == len(self.names) and len(near_leaves) == len(leaves)
            if found.status == "infeasible":
                if complete:
                    return found
                margin *= 8
                continue
            bound = found.bound if complete else min(found.bound, low + margin)
            near = found.objective - bound <= gap * abs(found.objective)
            if complete or near or found.objective <= low + margin or left <= 1.0:
                status = "optimal" if near else "feasible"
                return replace(found, status=status, bound=bound, seconds=time.process_time() - start)
            margin = found.objective - low

    def _kept(self, leaves: Sequence[Outcome], limit: float) -> list[int]:
        """The variables that a solution within the limit can use."""
        kept, early = [], set(self.early)
        for i, (whole, lower) in enumerate(zip(self.whole, self.lower, strict=True)):
            stays = not whole or lower != 0 or i in early
            if stays or any(leaf.objective + leaf.reduced[i] <= limit for leaf in leaves):
                kept.append(i)
        return kept

    def _branches(self, root: Outcome) -> list[Outcome]:
        """Relaxations that cover all solutions, in which the early variables are 0 or 1; infeasible ones left out.

        Each starts from the last one's basis. A branch that is not solved to the end has its parent's bound.
        """
        if root.engine is None or not self.branch:
            return [root]
        leaves, done, solved = [root], list[Outcome](), 0
        while leaves:
            leaves.sort(key=lambda leaf: -leaf.objective)
            leaf = leaves.pop()
            split = next((i for i in self.early if 1e-6 < leaf.values[i] < 1 - 1e-6), None)
            if split is None or solved >= _BRANCHES:
                done.append(leaf)
                continue
            for side in (0.0, 1.0):
                leaves += self._again(leaf, {**leaf.fixed, split: side})
            solved += 2
        return done

    def _again(self, parent: Outcome, fixed: Mapping[int, float]) -> list[Outcome]:
        """A relaxation with the early variables fixed: none if it is infeasible."""
        engine = parent.engine
        for i in self.early:
            lower, upper = (fixed[i], fixed[i]) if i in fixed else (self.lower[i], self.upper[i])
            engine.changeColBounds(parent.columns[i], lower, upper)
        engine.run()
        status = engine.modelStatusToString(engine.getModelStatus())
        if status == "Infeasible":
            return []
        if status != "Optimal":
            return [replace(parent, fixed=fixed)]
        solution, objective = engine.getSolution(), float(engine.getInfo().objective_function_value)
        values, reduced = ([numbers[c] for c in parent.columns] for numbers in (solution.col_value, solution.col_dual))
        return [replace(parent, values=values, objective=objective, bound=objective, reduced=reduced, fixed=fixed)]

    def _optimise(
        self,
        solver: str,
        kept: Sequence[int],
        integer: bool,
        time_limit: float,
        gap: float,
        fixed: Mapping[int, float] | None = None,
    ) -> Outcome:
        """The program with all variables outside `kept` at 0, as it is or relaxed; some `fixed` at a value."""
        problem = pulp.LpProblem("plan", pulp.LpMinimize)
        variables: list[pulp.LpVariable | None] = [None] * len(self.names)
        for i in kept:
            category = pulp.LpInteger if integer and self.integer[i] else pulp.LpContinuous
            lower, upper = (fixed[i], fixed[i]) if fixed and i in fixed else (self.lower[i], self.upper[i])
            variables[i] = pulp.LpVariable(f"v{i}", lower, upper, category)
        problem.addVariables([v for v in variables if v is not None])
        problem.setObjective(_expression(variables, self.cost))
        for number, (_, terms, sense, right) in enumerate(self.rows):
            expression = _expression(variables, terms)
            if expression or (right < 0 if sense < 0 else right > 0 if sense > 0 else right != 0):
                problem.addConstraint(pulp.LpConstraint(expression, _SENSES[sense], f"r{number}", right))
        start = time.process_time()
        problem.solve(self._engine(solver, time_limit, gap))
        seconds = time.process_time() - start
        status = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionIntegerFeasible: "feasible"}.get(problem.sol_status)
        if status is None:
            if problem.status == pulp.LpStatusInfeasible:
                return Outcome("infeasible", (), math.inf, math.inf, seconds)
            raise AutoparError(f"the solver found no plan within {time_limit:g} seconds: give it more time_limit")
        values = [0.0 if v is None else (v.varValue or 0.0) for v in variables]
        value = sum(c * values[i] for i, c in self.cost.items())
        reduced = [] if integer else [0.0 if v is None else (v.dj or 0.0) for v in variables]
        bound = self._bound(problem, value, gap, status, integer)
        engine = None if integer else getattr(problem, "solverModel", None)
        columns = [] if engine is None else [v.index for v in variables if v is not None]
        return Outcome(status, values, value, bound, seconds, reduced, engine, columns)

    def _engine(self, solver: str, time_limit: float, gap: float) -> pulp.LpSolver:
        if solver == "highs" and pulp.HiGHS(msg=False).available():
            return pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit, gapRel=gap, random_seed=0)
        if solver in SOLVERS:
            return pulp.PULP_CBC_CMD(msg=False, threads=1, timeLimit=time_limit, gapRel=gap)
        raise InputError(f"solver {solver!r} is unknown: use one of {', '.join(SOLVERS)}")

    def _bound(self, problem: pulp.LpProblem, value: float, gap: float, status: str, integer: bool) -> float:
        model = getattr(problem, "solverModel", None)
        if not integer:
            return value
        if model is not None:
            return min(value, float(model.getInfo().mip_dual_bound))
        return value * (1 - gap) if status == "optimal" else 0.0


def _expression(variables: Sequence[pulp.LpVariable | None], terms: Mapping[int, float]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression([(v, c) for i, c in terms.items() if (v := variables[i]) is not None])


def _sum(terms: Terms) -> dict[int, float]:
    found: dict[int, float] = {}
    for variable, coefficient in terms.items() if isinstance(terms, Mapping) else terms:
        found[variable] = found.get(variable, 0.0) + coefficient
    return found
