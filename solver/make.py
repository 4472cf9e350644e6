"""From a graph with strategies to a plan: state the problem, solve it, say what was found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.memory.states import OPTIMIZERS
from autopar.cost.structure.blocks import Repeat, repeats_under
from autopar.errors import InfeasibleError, InputError, TimeLimitError
from autopar.layout import Layout
from autopar.plans import GAP, Certificate, Plan, PlanSize
from autopar.precision import Precision
from autopar.solver.building import build_problem
from autopar.solver.constraints.constraints import restrict, satisfied
from autopar.solver.constraints.idle_constraints import warn_of_idle
from autopar.solver.constraints.pins import names_any
from autopar.solver.constraints.recompute_checks import check_recompute
from autopar.solver.constraints.restricted import Restricted, Strategies
from autopar.solver.constraints.unpinned import meets, without_parting
from autopar.solver.linear.engines import engine_of
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.request import SolveRequest
from autopar.solver.seconds.objective import price
from autopar.solver.solution import Predicted, Solution, node_plans
from autopar.solver.solving import Watch, solve
from autopar.strategies.strategy import Strategy


def make_plan(
    graph: fx.Graph,
    strategies: Strategies,
    cluster: Cluster,
    *,
    parameters: Mapping[str, torch.Tensor],
    memory_budget_bytes: int | None = None,
    precision: Precision | None = None,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    constraints: Sequence[str] = (),
    inputs: str = "global",
    time_limit: float = 60.0,
    gap: float = GAP,
    solver: str = "highs",
    pinned: Mapping[str, Layout] | None = None,
    trained: Collection[str] = (),
    train: bool = True,
    buffers: Mapping[str, torch.Tensor] | None = None,
    fold: bool = True,
    repeats: tuple[Repeat, ...] | None = None,
    fingerprints: Mapping[str, str] | None = None,
) -> Plan:
    """The fastest plan of an annotated graph that fits the memory budget.

    Args:
        graph: nodes carry VAL and COST; shapes are those of one micro-batch of the whole mesh.
        strategies: for every node with tensors; of parameters, the storages.
        parameters: the model's parameters by qualified name.
        memory_budget_bytes: peak allocated bytes per device; None: what the device has (`Device.usable_bytes`).
        micro_batches: backward passes of one optimizer step.
        optimizer: a name of `cost.memory.states.OPTIMIZERS`: whose state takes memory.
        constraints: schemes and pins as text (`solver.constraints.schemes`, `solver.constraints.pins`).
        inputs: "global" or "local", for the plan alone: how the runtime is given batches.
        time_limit: CPU seconds of the solver.
        solver: "highs" or "cbc".
        pinned: storage of parameters that is given already, by an earlier plan of the model; constraints that name
            nothing of this graph are passed over then.
        trained: parameters that other graphs of the model train.
        train: False plans a forward pass alone.
        buffers: the model's buffers by qualified name: those that the graph does not read take memory too.
        fold: let equal repeated blocks share their decisions.
        repeats: the graph's blocks, where they are known (`find_repeats`).
        gap: how far from the optimum, relatively, the plan may be.

    Raises:
        InputError: an argument is unknown, or a constraint matches nothing.
        InfeasibleError: no plan fits; it states the smallest budget that has one.
    """
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
    if micro_batches < 1:
        raise InputError(f"micro_batches is {micro_batches}: it must be 1 or more")
    precision = precision or Precision()
    memory = memory_on(cluster, graph, parameters, precision, optimizer, micro_batches, train, buffers, pinned, trained)
    watch = Watch()
    stored = _with_storage(strategies, memory, pinned or {})
    if pinned is not None:  # another call of a planned model, which need not run all that the first one did
        constraints = [text for text in constraints if names_any(memory, text)]
    planner = _Planner(
        graph=graph,
        strategies=stored,
        memory=memory,
        cluster=cluster,
        budget_bytes=cluster.device.usable_bytes if memory_budget_bytes is None else memory_budget_bytes,
        time_limit=time_limit,
        gap=gap,
        solver=solver,
        fold=fold,
        repeats=repeats,
        train=train,
        watch=watch,
    )
    warn_of_idle(strategies, memory, constraints, cluster.axis_names)
    problem, solution, (prediction, collectives, buckets) = satisfied(constraints, planner.solve, planner.has_plan)
    objective = prediction.step_seconds
    bound = min(solution.bound, objective)
    nodes = node_plans(graph, solution.chosen)
    return Plan(
        mesh_shape=cluster.shape,
        axis_names=cluster.axis_names,
        cluster=cluster.to_dict(),
        fingerprints=dict(fingerprints or {}),
        precision=precision.to_dict(),
        micro_batches=micro_batches,
        optimizer=optimizer,
        inputs=inputs,
        memory_budget_bytes=memory_budget_bytes,
        constraints=tuple(constraints),
        nodes=nodes,
        parameters=tuple(solution.parameters.values()),
        recompute=solution.segments,
        collectives=collectives,
        buckets=buckets,
        predicted=prediction,
        certificate=Certificate(
            solution.status, objective, bound, (objective - bound) / objective if objective else 0.0, engine_of(solver)
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
    """Plans one graph on one cluster under any list of constraints; `strategies` are those before constraints."""

    graph: fx.Graph
    strategies: Strategies
    memory: StepMemory
    cluster: Cluster
    budget_bytes: int
    time_limit: float
    gap: float
    solver: str
    fold: bool
    repeats: tuple[Repeat, ...] | None
    train: bool
    watch: Watch

    def solve(self, constraints: Sequence[str]) -> tuple[Problem, Solution, Predicted]:
        """The fastest plan; pins that tell equal blocks apart are left out first, and asked only if it breaks them."""
        request = self._request(constraints)
        fewer = without_parting(constraints, request.memory, request.restricted)
        if fewer is not None:
            try:
                found = solve(self._request(fewer), self.watch)
                if meets(found[1], request.memory, request.restricted):
                    return found
            except (InfeasibleError, TimeLimitError):  # what is asked is solved all the same, and has its own message
                self.watch.lap("ilp")
        return solve(request, self.watch)

    def has_plan(self, constraints: Sequence[str]) -> bool:
        """Whether some plan meets the constraints, whatever memory it takes; a relaxation that has one is believed."""
        try:
            memory, restricted = self._restricted(constraints)
            model = Model(build_problem(memory, restricted, self.cluster, memory.repeats, recompute=False))
            price(model)
        except InfeasibleError:  # an op has no way to run, or none to get what it reads
            return False
        return model.program.relax(self.solver, self.time_limit, {}).status != "infeasible"

    def _request(self, constraints: Sequence[str]) -> SolveRequest:
        memory, restricted = self._restricted(constraints)
        return SolveRequest(
            memory,
            restricted,
            self.cluster,
            constraints,
            self.budget_bytes,
            self.time_limit,
            self.gap,
            self.solver,
            self.fold,
        )

    def _restricted(self, constraints: Sequence[str]) -> tuple[StepMemory, Restricted]:
        """What the constraints leave, and the blocks that are equal under them."""
        restricted = restrict(self.strategies, self.memory, constraints, self.cluster.axis_names)
        memory = replace(self.memory, repeats=repeats_under(self.graph, restricted.marks, self.repeats))
        if self.train:
            check_recompute(constraints, memory, restricted)
        return memory, restricted


def _with_storage(strategies: Strategies, memory: StepMemory, pinned: Mapping[str, Layout]) -> Strategies:
    """Strategies in which parameters have the storage that they have already."""
    if not pinned:
        return strategies
    found = dict(strategies)
    for node in strategies:
        if memory.is_parameter(node) and str(node.target) in pinned:
            found[node] = (Strategy((), (pinned[str(node.target)],), ("",) * len(memory.mesh_shape)),)
    return found
