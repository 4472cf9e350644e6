"""From a graph with strategies to a plan: build the problem, solve it, and collect the plan's parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.states import OPTIMIZERS
from autopar.cost.structure.blocks import repeats_under
from autopar.errors import InfeasibleError, InputError, TimeLimitError
from autopar.plan_request import PlanRequest
from autopar.plans import Certificate, Plan, PlanSize
from autopar.solver.building import build_problem
from autopar.solver.constraints.constraints import restrict, satisfied
from autopar.solver.constraints.idle_constraints import warn_of_idle
from autopar.solver.constraints.pins import names_any
from autopar.solver.constraints.recompute_checks import check_recompute
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.constraints.unpinned import meets, without_parting
from autopar.solver.linear.engines import engine_of
from autopar.solver.model import Model
from autopar.solver.model_graph import ModelGraph
from autopar.solver.problem import Problem
from autopar.solver.request import SolveRequest
from autopar.solver.seconds.objective import price
from autopar.solver.solution import Predicted, Solution, node_plans
from autopar.solver.solving import solve
from autopar.stopwatch import Stopwatch


def make_plan(model: ModelGraph, cluster: Cluster, request: PlanRequest) -> Plan:
    """The fastest plan of a model's graph that fits the memory budget.

    If the storage of parameters is given by an earlier plan, constraints that match nothing in this graph, or nothing
    that can be recomputed, are ignored.

    Raises:
        InputError: the optimizer or the number of micro-batches is invalid, or a constraint matches nothing.
        InfeasibleError: no plan fits; the error states the smallest budget that has a plan.
        TimeLimitError: no plan was found in time.
    """
    if request.optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {request.optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
    if request.micro_batches < 1:
        raise InputError(f"micro_batches is {request.micro_batches}: it must be 1 or more")
    memory, watch = model.memory_on(cluster, request), Stopwatch()
    if model.pinned is not None:  # another call of a planned model, which need not use all that the first call used
        request = replace(request, constraints=tuple(text for text in request.constraints if names_any(memory, text)))
    constraints = request.constraints
    planner = _Planner(model.as_stored(memory), memory, cluster, request, watch)
    warn_of_idle(model.strategies, memory, constraints, cluster.axis_names)
    problem, solution, (prediction, collectives, buckets) = satisfied(constraints, planner.solve, planner.has_plan)
    objective = prediction.step_seconds
    bound = min(solution.bound, objective)
    nodes = node_plans(model.graph, solution.chosen)
    return Plan(
        mesh_shape=cluster.shape,
        axis_names=cluster.axis_names,
        cluster=cluster.to_dict(),
        fingerprints=dict(model.fingerprints),
        precision=request.precision.to_dict(),
        micro_batches=request.micro_batches,
        optimizer=request.optimizer,
        inputs=request.inputs,
        memory_budget_bytes=request.memory_budget_bytes,
        constraints=constraints,
        nodes=nodes,
        parameters=tuple(solution.parameters.values()),
        recompute=solution.segments,
        collectives=collectives,
        buckets=buckets,
        predicted=prediction,
        certificate=Certificate(
            solution.status,
            objective,
            bound,
            (objective - bound) / objective if objective else 0.0,
            engine_of(request.solver),
        ),
        size=PlanSize(
            ops=len(nodes),
            decisions=sum(len(op.choices) > 1 and op.like is None for op in problem.ops),
            variables=solution.variables,
            rows=solution.rows,
        ),
        planning_seconds=watch.seconds,
    )


@dataclass(frozen=True)
class _Planner:
    """Plans one graph on one cluster under given constraints, which replace those in `request`."""

    model: ModelGraph
    memory: StepMemory
    cluster: Cluster
    request: PlanRequest
    watch: Stopwatch

    def solve(self, constraints: Sequence[str]) -> tuple[Problem, Solution, Predicted]:
        """The fastest plan. Pins that make equal blocks differ are left out first; if the plan violates them, the
        problem is solved again with all constraints."""
        with self.watch.stage("build"):
            request = self._request(constraints)
            without = without_parting(constraints, request.memory, request.restricted)
        if without is not None:
            with suppress(InfeasibleError, TimeLimitError):  # the problem with all constraints gives its own message
                solved = solve(self._request(without), self.watch)
                if meets(solved[1], request.memory, request.restricted):
                    return solved
        return solve(request, self.watch)

    def has_plan(self, constraints: Sequence[str]) -> bool:
        """Whether some plan meets the constraints with unlimited memory; a feasible relaxation counts as a plan."""
        try:
            memory, restricted = self._restricted(constraints)
            model = Model(build_problem(memory, restricted, self.cluster, memory.repeats, recompute=False))
            price(model)
        except InfeasibleError:  # an op has no strategy, or cannot get an input
            return False
        return model.program.relax(self.request.solver, self.request.time_limit, {}).status != "infeasible"

    def _request(self, constraints: Sequence[str]) -> SolveRequest:
        memory, restricted = self._restricted(constraints)
        request = self.request
        return SolveRequest(
            memory,
            restricted,
            self.cluster,
            constraints,
            budget_bytes=request.budget_bytes_on(self.cluster),
            time_limit=request.time_limit,
            gap=request.gap,
            solver=request.solver,
            fold=request.fold,
        )

    def _restricted(self, constraints: Sequence[str]) -> tuple[StepMemory, Restricted]:
        """The strategies that the constraints leave, and the memory with the repeats of blocks that stay equal."""
        restricted = restrict(self.model.strategies, self.memory, constraints, self.cluster.axis_names)
        memory = replace(self.memory, repeats=repeats_under(self.model.graph, restricted.marks, self.model.repeats))
        if self.model.train and self.model.pinned is None:  # a loop may freeze blocks before later calls
            check_recompute(constraints, memory, restricted)
        return memory, restricted
