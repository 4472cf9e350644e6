"""Reading a solution of the program: a strategy for every node, the storage of parameters, recomputed segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.step import predict
from autopar.cost.structure.levels import Levels
from autopar.cost.structure.naming import part_name, stretch_name
from autopar.cost.traffic import replay_end
from autopar.errors import InfeasibleError
from autopar.graph import SCOPE, output_tensors, target_name, tensor_inputs
from autopar.layout import Layout
from autopar.plans import Bucket, Collective, NodePlan, ParameterPlan, Prediction, Segment
from autopar.solver.linear.outcome import Outcome
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.strategies.strategy import Strategy

Predicted = tuple[Prediction, tuple[Collective, ...], tuple[Bucket, ...]]  # the result of `predict`


@dataclass(frozen=True)
class Solution:
    """A plan (a strategy per node, storage per parameter, recomputed segments) and what the solver proved of it."""

    chosen: Mapping[fx.Node, Strategy]
    parameters: Mapping[str, ParameterPlan]
    segments: tuple[Segment, ...]
    status: str
    seconds: float  # the program's objective
    bound: float
    variables: int
    rows: int


def predicted(solution: Solution, problem: Problem) -> Predicted:
    """The predicted cost of a step with a solution, computed without the program."""
    return predict(
        problem.memory,
        problem.cluster,
        solution.chosen,
        solution.parameters,
        solution.segments,
        problem.repeats,
    )


def read_solution(model: Model, outcome: Outcome) -> Solution:
    """The plan of the program's values, with a strategy for every node of every block.

    Raises InfeasibleError if the program has no solution.
    """
    if outcome.status == "infeasible":
        raise InfeasibleError("no plan fits the budget and the constraints")
    problem = model.problem
    nodes = list(problem.memory.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    chosen: dict[fx.Node, Strategy] = {}
    parameters: dict[str, ParameterPlan] = {}
    segments: list[Segment] = []
    for number, op in enumerate(problem.ops):
        stage = problem.stages[op.stage]
        best = max(range(len(op.choices)), key=lambda i: outcome.values[model.x[number][i]])
        choice = op.choices[best]
        period = stage.repeat.period if stage.repeat else 0
        for i in range(stage.count):
            node = nodes[position[op.node] + i * period]
            chosen[node] = choice.strategy
            if problem.memory.is_parameter(node):
                parameters[str(node.target)] = _parameter_plan(
                    problem.memory, node, choice.strategy.outputs[0], choice.regather
                )
    for number, stage in enumerate(problem.stages):
        if stage.levels is not None and stage.repeat is not None:
            counts = [round(outcome.values[r]) for r in model.recomputed[number]]
            for i in range(counts[0]):
                level = sum(count > i for count in counts)
                block = nodes[stage.repeat.instance(stage.first + i).start :][: stage.repeat.period]
                segments += segments_of(problem.memory, block, position[block[0]], stage.levels, level)
    in_order = {node: chosen[node] for node in nodes if node in chosen}
    size = len(model.program.names), len(model.program.rows)
    return Solution(in_order, parameters, tuple(segments), outcome.status, outcome.objective, outcome.bound, *size)


def segments_of(
    memory: StepMemory, block: Sequence[fx.Node], start: int, levels: Levels, level: int
) -> Iterator[Segment]:
    """The segments of a block, which begins at position `start`, at a level of recompute."""
    inner = level < len(levels)
    for first, last in levels.spans(level):
        inside = block[first : last + 1]
        replayed = start + first + replay_end(memory, inside) - 1
        name = part_name(inside, stretch_name(block)) if inner else stretch_name(block)
        yield Segment(start + first, start + last, name, replayed, inner)


def _parameter_plan(memory: StepMemory, node: fx.Node, storage: Layout, regather: bool) -> ParameterPlan:
    tensor = memory.parameters[str(node.target)]
    dtype = str(memory.stored_dtype(node)).removeprefix("torch.")
    return ParameterPlan(str(node.target), tuple(tensor.shape), dtype, storage, tensor.requires_grad, regather)


def node_plans(graph: fx.Graph, chosen: Mapping[fx.Node, Strategy]) -> tuple[NodePlan, ...]:
    """The plans of all nodes with a strategy. A node without tensor outputs (sizes and the like) reads its inputs in
    the layouts that they have."""
    plans = []
    readers: dict[tuple[Layout, ...], Strategy] = {}  # of nodes without tensor outputs, by the layouts that they read
    for position, node in enumerate(graph.nodes):
        strategy = chosen.get(node)
        outputs = output_tensors(node)
        if strategy is None:
            refs = tensor_inputs(node) if node.op != "output" and not outputs else []
            if not refs or any(ref.node not in chosen for ref in refs):
                continue
            layouts = tuple([chosen[ref.node].outputs[ref.index] for ref in refs])
            strategy = readers.setdefault(layouts, Strategy(layouts, (), ("",) * len(layouts[0])))
        scope = node.meta.get(SCOPE, ())
        plans.append(
            NodePlan(
                position=position,
                name=node.name,
                target=target_name(node),
                scope=scope[-1][0] if scope else "",
                inputs=strategy.inputs,
                outputs=strategy.outputs,
                shapes=tuple([tuple(t.shape) for t in outputs]),
                factors=strategy.factors,
                local=strategy.local,
            )
        )
    return tuple(plans)
