"""Random planning problems, small enough for exhaustive search over all plans; the seed determines the problem."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from toys import Toy, cluster, firsts, on_meta, toy

from autopar.cost.memory.transfer_bytes import replay_transfer_bytes
from autopar.cost.step import predict
from autopar.errors import LayoutError
from autopar.graph import tensor_of
from autopar.plans import ParameterPlan, Prediction, Segment
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.terms import Array, Linear
from autopar.solver.memory.rows import Rows
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.model import Model
from autopar.solver.problem import Choice, Problem, Stage
from autopar.solver.solution import segments_of

WIDTH, MOST_OPS = 8, 8
MESHES = [(2, 2), (2, 2, 2)]


def is_with_blocks(seed: int) -> bool:
    """Every second graph has two equal blocks, which may be recomputed; the others have none."""
    return seed % 2 == 1


class Drawn(nn.Module):
    """A random chain of ops, some of which read an earlier value too, as one block or two equal ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.blocks = 2 if is_with_blocks(seed) else 1
        kinds = ["linear", *(draw.choice(POINTWISE) for _ in range(draw.randint(0, 2) + (self.blocks == 1)))]
        if self.blocks == 1:
            kinds += draw.choice([[], ["linear"], ["matmul"], ["linear", "matmul"]])
        draw.shuffle(kinds)
        first = self.blocks == 2 and draw.random() < 0.5  # whether an op precedes the first block too
        self.before = [draw.choice(["linear", "gelu"])] if first else []
        self.steps = [(kind, draw.random()) for kind in kinds]
        self.first = nn.Parameter(torch.empty(WIDTH, WIDTH))
        count = self.blocks * sum(kind == "linear" for kind in kinds)
        self.weights = nn.ParameterList(torch.empty(WIDTH, WIDTH) for _ in range(count))
        self.end = draw.choice(["sum", "mean"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = iter(self.weights)
        for kind in self.before:
            x = functional.linear(x, self.first) if kind == "linear" else functional.gelu(x)
        for _ in range(self.blocks):
            x = _block(self.steps, weights, x)
        return x.sum() if self.end == "sum" else x.mean()


def _block(steps: Sequence[tuple[str, float]], weights: Iterator[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    """Run the ops in order: each reads the result before it, and a binary op also some earlier result."""
    values = [x]
    for kind, other in steps:
        a, b = values[-1], values[int(other * len(values))]
        values.append(functional.linear(a, next(weights)) if kind == "linear" else RUN[kind](a, b))
    return values[-1]


class Levelled(nn.Module):
    """Equal blocks with products and pointwise ops; an inner level of recompute replays the pointwise ops alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"levels {seed}")
        kinds = [draw.choice(["norm", "gelu", "softmax"]), "linear", *draw.choices(POINTWISE, k=draw.randint(1, 2))]
        kinds += draw.choice([["linear"], ["linear", "add"], []])
        self.blocks = draw.choice([2, 2, 3])
        self.steps = [(kind, draw.random()) for kind in kinds]
        self.first = nn.Parameter(torch.empty(WIDTH, WIDTH))
        count = self.blocks * kinds.count("linear")
        self.weights = nn.ParameterList(torch.empty(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = iter(self.weights)
        x = functional.gelu(functional.linear(x, self.first))
        for _ in range(self.blocks):
            x = _block(self.steps, weights, x)
        return x.square().mean()


class Handed(Levelled):
    """As `Levelled`, but the op before the blocks saves its result, which is what the first block reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = iter(self.weights)
        x = torch.softmax(functional.linear(x, self.first), -1)
        for _ in range(self.blocks):
            x = _block(self.steps, weights, x)
        return x.square().mean()


class Returning(Levelled):
    """As `Levelled`, but the model also returns a tensor of each block: its result or, if blocks have an odd number of
    ops, the result of their second op."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = iter(self.weights)
        x = functional.gelu(functional.linear(x, self.first))
        early, held = len(self.steps) % 2, []
        for _ in range(self.blocks):
            if early:
                x = _block(self.steps[:2], weights, x)
                held.append(x)
                x = _block(self.steps[2:], weights, x)
            else:
                x = _block(self.steps, weights, x)
                held.append(x)
        return x.square().mean(), *held


class Beside(Levelled):
    """As `Levelled`, but the model also returns results that get no gradient, of an op (softmax) that saves its result:
    one at the end or, if blocks have an odd number of ops, one for each block."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = iter(self.weights)
        x = functional.gelu(functional.linear(x, self.first))
        each, held = len(self.steps) % 2, []
        for _ in range(self.blocks):
            x = _block(self.steps, weights, x)
            if each:
                held.append(torch.softmax(x, -1))
        return x.square().mean(), *(held or [torch.softmax(x, -1) * 2.0])


RUN = {
    "relu": lambda a, b: functional.relu(a),
    "gelu": lambda a, b: functional.gelu(a),
    "scale": lambda a, b: a * 3.0,
    "softmax": lambda a, b: torch.softmax(a, -1),
    "norm": lambda a, b: functional.layer_norm(a, (WIDTH,)),
    "add": lambda a, b: a + b,
    "times": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b.transpose(0, 1) @ b,
}
POINTWISE = [name for name in RUN if name != "matmul"]


def drawn(seed: int, most_plans: int, module: type[nn.Module] = Drawn, *, fold: bool = False) -> Toy:
    """A random graph, mesh with speeds, micro-batches, and strategies of each op, for at most `most_plans` plans."""
    draw = random.Random(f"problem {seed}")
    mesh = draw.choice(MESHES)
    x = torch.empty(8 * draw.choice([1, 8, 64]), WIDTH, device="meta", requires_grad=draw.random() < 0.3)
    found = toy(on_meta(module, seed), x, on=cluster(*mesh, seed=seed), micro_batches=draw.choice([1, 1, 2]))
    everything = dict(found.restricted.strategies)
    same = firsts(found.graph, found.repeats, everything)  # equal ops of all blocks share the strategies that are drawn
    own = [node for node in everything if node not in same]
    numbers = {node: list(range(len(everything[node]))) for node in own}
    for some in numbers.values():
        some[1:] = draw.sample(some[1:], min(3, len(some) - 1))
    while True:
        strategies = {node: tuple(some[i] for i in numbers[same.get(node, node)]) for node, some in everything.items()}
        found.restricted = replace(found.restricted, strategies=strategies)
        problem = found.problem(fold=fold)
        counts = math.prod(len(every_count(problem.stages[i])) for i in recomputable(problem))
        if math.prod(len(op.choices) for op in problem.ops) * counts <= most_plans:
            return found
        more = [node for node in own if len(numbers[node]) > 1]
        if not more:
            return found
        numbers[draw.choice(more)].pop()


@dataclass(frozen=True)
class Tried:
    """A plan with its prediction: each op's choice and, by stage that may recompute and by level, a count of blocks."""

    choices: tuple[int, ...]
    recomputed: tuple[tuple[int, ...], ...]
    predicted: Prediction


def recomputable(problem: Problem) -> list[int]:
    """The indices of the stages whose blocks may be recomputed."""
    return [i for i, stage in enumerate(problem.stages) if stage.recomputable]


def every_count(stage: Stage) -> list[tuple[int, ...]]:
    """Every combination of how many blocks recompute at level 1 or higher, level 2 or higher, and so on."""
    counts = itertools.product(range(stage.count + 1), repeat=stage.depth)
    return [some for some in counts if list(some) == sorted(some, reverse=True)]


def every_plan(asked: Toy, problem: Problem, *, recompute: bool) -> Iterator[Tried]:
    """All plans of a problem, except those with layouts between which no conversion exists."""
    stages = [problem.stages[i] for i in recomputable(problem)]
    nodes = list(asked.graph.nodes)
    for numbers in itertools.product(*(range(len(op.choices)) for op in problem.ops)):
        choices = [op.choices[i] for op, i in zip(problem.ops, numbers, strict=True)]
        chosen = {node: choices[problem.op_of[node]].strategy for node in nodes if node in problem.op_of}
        parameters = {
            str(node.target): _stored(str(node.target), choices[problem.op_of[node]])
            for node in chosen
            if asked.memory.is_parameter(node)
        }
        for counts in itertools.product(*(every_count(s) if recompute else [(0,) * s.depth] for s in stages)):
            segments = [one for s, some in zip(stages, counts, strict=True) for one in _segments(asked, s, some)]
            try:
                found = predict(asked.memory, asked.cluster, chosen, parameters, segments, asked.repeats)[0]
            except LayoutError:
                continue
            yield Tried(numbers, counts, found)


def _segments(asked: Toy, stage: Stage, counts: tuple[int, ...]) -> Iterator[Segment]:
    assert stage.repeat is not None and stage.levels is not None
    for i in range(counts[0]):
        span = stage.repeat.instance(stage.first + i)
        block = list(asked.graph.nodes)[span.start : span.stop]
        yield from segments_of(asked.memory, block, span.start, stage.levels, sum(many > i for many in counts))


def _stored(name: str, choice: Choice) -> ParameterPlan:
    return ParameterPlan(name, (), "", choice.strategy.outputs[0], True, choice.regather)


class Fixed:
    """The memory program of a problem, in which the variables can be fixed to one plan at a time."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model = problem, Model(problem)
        program = self.model.program
        program.cost = Linear({Rows(self.model, None).peak: 1.0}).array(len(program.names))

    def least(self, choices: Sequence[int], recomputed: Sequence[Sequence[int]]) -> Outcome:
        """The smallest peak in MiB that the memory rows allow for a plan.

        `choices`: one for each op; `recomputed`: for each stage that may recompute, how many blocks do so by level.
        """
        model, program = self.model, self.model.program
        for variables, wanted in zip(model.x, choices, strict=True):
            for i, variable in enumerate(variables):
                program.lower[variable] = program.upper[variable] = float(i == wanted)
        for stage, counts in zip(recomputable(self.problem), recomputed, strict=True):
            for r, q, many in zip(model.recomputed[stage], model.any_recomputed[stage], counts, strict=True):
                program.lower[r] = program.upper[r] = float(many)
                program.lower[q] = program.upper[q] = float(many > 0)
        program._matrix = None  # the cached matrix has the bounds of the previous plan
        return program.integrate("highs", self._chosen(), 60.0, 0.0, {})

    def rows_bytes(self, plan: Tried) -> float:
        """The plan's peak in bytes according to the program's memory rows."""
        return self.least(plan.choices, plan.recomputed).objective * UNIT

    def _chosen(self) -> Array:
        """The columns that may be nonzero: all but choices not made, and flows that start or end at such choices."""
        matrix = self.model.program.matrix()
        some, made = matrix.upper > 0, np.zeros(matrix.lines, dtype=bool)
        made[matrix.end_rows[some[matrix.end_choices]]] = True
        flows, out, into = matrix.flows.T
        some[flows] = made[out] & made[into]
        return np.flatnonzero(some)


def read_bytes(asked: Toy, problem: Problem, plan: Tried) -> int:
    """Upper bound on the bytes that the rows may count in excess of the prediction because of recomputed blocks, at
    full size: their inputs, all inputs of their ops where only parts are recomputed, and what replays gather."""
    nodes = list(asked.graph.nodes)
    found = 0
    for stage, counts in zip((problem.stages[i] for i in recomputable(problem)), plan.recomputed, strict=True):
        assert stage.repeat is not None
        for i in range(counts[0]):
            span = stage.repeat.instance(stage.first + i)
            inside = nodes[span.start : span.stop]
            inner = i >= counts[-1]
            read = {ref for node in inside for ref in asked.memory.inputs[node] if inner or ref.node not in inside}
            found += sum(tensor_of(ref).nbytes for ref in read if not asked.memory.is_parameter(ref.node))
        found += _on_the_way(asked, problem, plan, stage) if any(counts) else 0
    return found


def _on_the_way(asked: Toy, problem: Problem, plan: Tried, stage: Stage) -> int:
    """Bytes of parameters gathered, or on their way, for the replays of a stage's first block."""
    found, memory = 0, asked.memory
    strategies = [op.choices[i].strategy for op, i in zip(problem.ops, plan.choices, strict=True)]
    for number in stage.ops:
        for ref, wanted in zip(memory.inputs[problem.ops[number].node], strategies[number].inputs, strict=True):
            if memory.is_parameter(ref.node):
                storage = strategies[problem.op_of[ref.node]].outputs[0]
                one = replay_transfer_bytes(memory, problem.grouping, ref, storage, wanted)
                found += one.gathered + one.arriving + one.landing + one.begun
    return found
