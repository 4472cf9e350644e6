"""From a graph with strategies to a plan: state the problem, solve it, say what was found."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.blocks import Repeat, repeats_under
from autopar.cost.memory import StepMemory
from autopar.cost.on_cluster import memory_on
from autopar.cost.states import OPTIMIZERS
from autopar.errors import InfeasibleError, InputError, TimeLimitError
from autopar.layout import Layout
from autopar.plans import GAP, Certificate, Plan, PlanSize
from autopar.precision import Precision
from autopar.sizes import show_bytes_up
from autopar.solver.building import build_problem
from autopar.solver.clock import cpu_seconds
from autopar.solver.constraints import restrict, satisfied
from autopar.solver.each_block import differing, refined
from autopar.solver.engines import engine_of
from autopar.solver.fast import Fast
from autopar.solver.idle_constraints import warn_of_idle
from autopar.solver.model import Model
from autopar.solver.pins import names_any
from autopar.solver.problem import Problem
from autopar.solver.recompute_checks import check_recompute
from autopar.solver.refusal import refusal, too_small
from autopar.solver.request import SolveRequest
from autopar.solver.restricted import Restricted, Strategies
from autopar.solver.running import price
from autopar.solver.smallest import LeastMemory
from autopar.solver.solution import Predicted, Solution, node_plans, predicted, read_solution
from autopar.solver.under_budget import fastest_near, fastest_within
from autopar.solver.unpinned import meets, without_parting
from autopar.solver.windows import SHARE
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
    budget = cluster.device.usable_bytes if memory_budget_bytes is None else memory_budget_bytes
    precision = precision or Precision()
    memory = memory_on(cluster, graph, parameters, precision, optimizer, micro_batches, train, buffers, pinned, trained)
    watch = _Watch()
    stored = _with_storage(strategies, memory, pinned or {})
    if pinned is not None:  # another call of a planned model, which need not run all that the first one did
        constraints = [text for text in constraints if names_any(memory, text)]

    def restricted(texts: Sequence[str]) -> tuple[StepMemory, Restricted]:
        """What some constraints leave, and the blocks that are equal under them."""
        left = restrict(stored, memory, texts, cluster.axis_names)
        found = replace(memory, repeats=repeats_under(graph, left.marks, repeats))
        if train:
            check_recompute(texts, found, left)
        return found, left

    def asked(texts: Sequence[str]) -> SolveRequest:
        return SolveRequest(*restricted(texts), cluster, texts, budget, time_limit, gap, solver, fold)

    def solved(texts: Sequence[str]) -> tuple[Problem, Solution, Predicted]:
        whole = asked(texts)
        fewer = without_parting(texts, whole.memory, whole.restricted)
        if fewer is not None:
            try:
                free = _solve(asked(fewer), watch)
                if meets(free[1], whole.memory, whole.restricted):
                    return free
            except (InfeasibleError, TimeLimitError):  # what is asked is solved all the same, and has its own message
                watch.lap("ilp")
        return _solve(whole, watch)

    def possible(texts: Sequence[str]) -> bool:
        try:
            return _has_plan(*restricted(texts), cluster, solver, time_limit)
        except InfeasibleError:  # an op has no way to run, or none to get what it reads
            return False

    warn_of_idle(strategies, memory, constraints, cluster.axis_names)
    problem, solution, told = satisfied(constraints, solved, possible)
    prediction, collectives, buckets = told
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


class _Watch:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def _solve(asked: SolveRequest, watch: _Watch) -> tuple[Problem, Solution, Predicted]:
    """Where whole parameters fit, first without budget and recompute: if that plan fits, nothing is faster."""
    end, free, fast = cpu_seconds() + asked.time_limit, 0.0, Fast(asked.solver, asked.gap)
    if _replicated_bytes(asked.memory) <= asked.budget_bytes and not asked.restricted.forces_replays:
        problem = asked.problem(recompute=False)
        watch.lap("build")
        model, outcome = fast.free(problem, asked.time_limit)
        watch.lap("ilp")
        solution = read_solution(model, outcome)
        free = solution.bound
        apart = differing(asked, model, solution, end - cpu_seconds())
        watch.lap("ilp")
        for one in (apart, solution) if apart is not solution else (solution,):
            told = predicted(one, problem)
            if told[0].peak_bytes <= asked.budget_bytes:
                return problem, one, told
    problem = asked.problem()
    watch.lap("build")
    least = LeastMemory(problem, fast, asked.time_limit)
    solution, told = _within_budget(asked, least, end - cpu_seconds(), free)
    if told[0].peak_bytes > asked.budget_bytes:
        solution, told = _within_budget(replace(asked, is_strict=True), least, max(end - cpu_seconds(), 0.0), free)
    watch.lap("ilp")
    return problem, solution, told


def _within_budget(asked: SolveRequest, least: LeastMemory, seconds: float, free: float) -> tuple[Solution, Predicted]:
    """With a budget, which the plan may pass by what solvers do not hold; `free`: the bound without one."""
    end, fast, problem, late = cpu_seconds() + seconds, least.fast, least.problem, None
    try:
        model, outcome, is_all = fastest_within(fast, problem, asked.usable_bytes, seconds, bound=free, small=least)
    except TimeLimitError as error:
        late = error
    if late is not None or (outcome.status == "infeasible" and not is_all):
        solution, told = _near_least_memory(asked, least, late)
        return replace(solution, bound=free), told
    if outcome.status == "infeasible":
        raise refusal(asked.budget_bytes, least, asked.constraints)
    solution = refined(asked, model, read_solution(model, outcome), end - cpu_seconds())
    return solution, predicted(solution, problem)


def _near_least_memory(
    asked: SolveRequest, least: LeastMemory, late: TimeLimitError | None
) -> tuple[Solution, Predicted]:
    """Where the search was too late to find a plan, or looked at few ways alone: that of the least memory may fit, and
    one near it be faster.

    Raises InfeasibleError where none is known that fits, and TimeLimitError where the search was too late to know.
    """
    budget, problem = asked.budget_bytes, least.problem
    try:
        smallest = least.smallest()
    except TimeLimitError as error:
        raise late or error from None
    if smallest is None or smallest.bound_bytes > budget:
        raise too_small(budget, smallest, problem, asked.constraints)
    if smallest.budget_bytes <= budget:
        known = smallest.model, smallest.outcome
        near = fastest_near(least.fast, problem, asked.usable_bytes, known, SHARE * asked.time_limit)
        if near is not None:
            solution = read_solution(*near)
            told = predicted(solution, problem)
            if told[0].peak_bytes <= budget:  # HiGHS holds rows to a byte
                return solution, told
    if late is None:
        raise too_small(budget, smallest, problem, asked.constraints)
    raise TimeLimitError(
        f"the solver found no plan within {asked.time_limit:.0f} seconds: give it more time_limit, or a larger memory "
        f"budget; the one of least memory that it knows needs {show_bytes_up(smallest.enough_bytes)}"
    ) from late


def _has_plan(memory: StepMemory, restricted: Restricted, cluster: Cluster, solver: str, time_limit: float) -> bool:
    """Whether what is left has some plan, whatever memory it takes; a relaxation that has one is believed."""
    model = Model(build_problem(memory, restricted, cluster, memory.repeats, recompute=False))
    price(model)
    return model.program.relax(solver, time_limit, {}).status != "infeasible"


def _replicated_bytes(memory: StepMemory) -> int:
    """What all weights and their states take where nothing is sharded."""
    whole = Layout.replicated(len(memory.mesh_shape))
    nodes = [node for node in memory.graph.nodes if memory.is_parameter(node)]
    return memory.fixed_bytes + sum(sum(memory.parameter_bytes(node, whole).values()) for node in nodes)


def _with_storage(strategies: Strategies, memory: StepMemory, pinned: Mapping[str, Layout]) -> Strategies:
    """Strategies in which parameters have the storage that they have already."""
    if not pinned:
        return strategies
    found = dict(strategies)
    for node in strategies:
        if memory.is_parameter(node) and str(node.target) in pinned:
            found[node] = (Strategy((), (pinned[str(node.target)],), ("",) * len(memory.mesh_shape)),)
    return found
