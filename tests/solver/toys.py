"""Small planning problems: random modules with few choices per op, and clusters on which only one cost counts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional

from autopar.cluster import Axis, Cluster, Device
from autopar.cost import annotate
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.step import predict
from autopar.cost.structure.blocks import Repeat, find_repeats
from autopar.cost.structure.levels import MOST
from autopar.plan_request import PlanRequest
from autopar.plans import Plan, Prediction
from autopar.precision import Precision
from autopar.solver import ModelGraph, make_plan
from autopar.solver.building import build_problem
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.linear.terms import Linear
from autopar.solver.memory.rows import Rows
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.search.pruning import Pruner
from autopar.solver.search.smallest import LeastMemory, Smallest
from autopar.solver.seconds.objective import run
from autopar.solver.solution import Solution, read_solution
from autopar.strategies import strategies_for
from autopar.strategies.strategy import Strategy
from autopar.tracing import trace


def cluster(*sizes: int, seed: int | None = None, compute: bool = True, kind: str = "cpu") -> Cluster:
    """A mesh with axes of these sizes; random speeds with a seed, equal ones without; `compute=False`: only
    communication costs."""
    draw = random.Random(seed) if seed is not None else None
    rate = draw.uniform(0.2, 5.0) if draw else 1.0
    fast = float("inf")
    device = Device(
        "toy",
        kind,
        memory_bytes=1 << 50,
        flops_per_s={"float32": rate * 1e9 if compute else fast, "bfloat16": rate * 1e9 if compute else fast},
        bytes_per_s=rate * 1e9 if compute else fast,
        efficiency=1.0,
        launch_seconds=1e-7 if compute else 0.0,
        overlap=draw.choice((0.0, 0.5, 1.0)) if draw else 0.0,
    )
    axes = [
        Axis(f"axis{i}", n, draw.uniform(0, 1e-7) if draw else 0.0, (draw.uniform(0.1, 10.0) if draw else 1.0) * 1e9)
        for i, n in enumerate(sizes)
    ]
    return Cluster(device, tuple(axes))


Strategies = Mapping[fx.Node, Sequence[Strategy]]


@dataclass
class Toy:
    """A traced module with its strategies, memory formulas and cluster: a planning problem that tests can inspect."""

    memory: StepMemory
    restricted: Restricted
    cluster: Cluster
    repeats: tuple[Repeat, ...]

    @property
    def graph(self) -> fx.Graph:
        return self.memory.graph

    @property
    def given(self) -> ModelGraph:
        return ModelGraph(self.graph, self.restricted.strategies, self.memory.parameters)

    def problem(self, *, fold: bool = True, recompute: bool = True, inner_levels: int = MOST) -> Problem:
        some = self.memory, self.restricted, self.cluster, self.repeats
        return build_problem(*some, fold=fold, recompute=recompute, inner_levels=inner_levels)

    def solve(
        self,
        budget: float | None = None,
        *,
        fold: bool = True,
        recompute: bool = True,
        gap: float = 1e-7,
        inner_levels: int = MOST,
    ) -> Solution:
        problem = self.problem(fold=fold, recompute=recompute, inner_levels=inner_levels)
        model = Model(problem)
        if budget is not None:
            Rows(model, budget)
        return read_solution(model, run(model, "highs", 60.0, gap))

    def smallest_budget(self, *, fold: bool = True, recompute: bool = True, inner_levels: int = MOST) -> float:
        """The smallest peak of any plan according to the program's memory rows."""
        model = Model(self.problem(fold=fold, recompute=recompute, inner_levels=inner_levels))
        rows = Rows(model, None)
        model.seconds = Linear({rows.peak: 1.0})
        return run(model, "highs", 60.0, 1e-4).objective * UNIT

    def predict(self, solution: Solution) -> Prediction:
        return predict(
            self.memory, self.cluster, solution.chosen, solution.parameters, solution.segments, self.repeats
        )[0]


def least_memory(problem: Problem, gap: float = 1e-4, **asked: float) -> Smallest:
    """The smallest budget that has a plan."""
    found = LeastMemory(problem, Pruner("highs", gap)).smallest(**asked)
    assert found is not None
    return found


def toy(
    module: nn.Module,
    *inputs: torch.Tensor,
    on: Cluster,
    keep: int | None = None,
    seed: int = 0,
    micro_batches: int = 1,
    precision: Precision | None = None,
    optimizer: str = "adamw",
) -> Toy:
    """The planning problem of a module; `keep`: restrict each op to at most so many strategies, drawn at random."""
    names = ["x", "y", "z"][: len(inputs)]
    precision = precision or Precision()
    traced = trace(
        module,
        dict(zip(names, inputs, strict=True)),
        bias_addition_split=True,
        remove_inplace=True,
        parameter_dtype=precision.compute,
    )
    annotate(traced.graph, on.device.kind)
    strategies = dict(strategies_for(traced.graph, on.shape))
    repeats = find_repeats(traced.graph)
    if keep is not None:
        draw = random.Random(seed)
        first = firsts(traced.graph, repeats, strategies)
        for node, options in strategies.items():
            some = draw.sample(range(1, len(options)), min(keep - 1, len(options) - 1))
            one = first.get(node)
            strategies[node] = strategies[one] if one else tuple(options[i] for i in [0, *sorted(some)])
    memory = memory_on(on, traced.graph, dict(module.named_parameters()), precision, optimizer, micro_batches)
    return Toy(memory, Restricted(strategies), on, repeats)


def firsts(graph: fx.Graph, repeats: Sequence[Repeat], strategies: Strategies) -> dict[fx.Node, fx.Node]:
    """Each node of a later block with the same strategies as its equal in the first block, and that equal node."""
    nodes = list(graph.nodes)
    found = {
        nodes[position]: nodes[repeat.start + k]
        for repeat in repeats
        for i in range(1, repeat.count)
        for k, position in enumerate(repeat.instance(i))
    }
    return {node: one for node, one in found.items() if node in strategies and strategies[node] == strategies.get(one)}


class Random(nn.Module):
    """A few ops drawn at random around one or two weights, with a scalar at the end."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
        self.other = nn.Parameter(torch.empty(8, 8, device="meta")) if draw.random() < 0.5 else None
        self.ops = [draw.choice(["relu", "add", "scale", "softmax"]) for _ in range(draw.randint(1, 2))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.weight)
        for op in self.ops:
            if op == "relu":
                y = functional.relu(y)
            elif op == "add":
                y = y + x
            elif op == "scale":
                y = y * 3.0
            else:
                y = torch.softmax(y, -1)
        if self.other is not None:
            y = functional.linear(y, self.other)
        return y.sum()


class Beside(nn.Module):
    """Returns a loss, the tensor it is computed from, and a result that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device="meta"))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = functional.linear(x, self.weight)
        return torch.relu(y).sum(), y, y * 2.0


class Block(nn.Module):
    """Two products around a nonlinearity, and a norm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(functional.gelu(self.up(x))))


class Stack(nn.Module):
    """Equal blocks, then a head and a loss."""

    def __init__(self, blocks: int, width: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def on_meta(module: type[nn.Module], *args: object) -> nn.Module:
    """A module on the meta device."""
    with torch.device("meta"):
        return module(*args)


def stack(*mesh: int, blocks: int = 3) -> Toy:
    """The planning problem of a `Stack`."""
    return toy(on_meta(Stack, blocks), torch.empty(512, 16, device="meta"), on=cluster(*mesh))


def planned(problem: Toy, *constraints: str, budget: int | None = None) -> Plan:
    """The best plan under constraints."""
    asked = PlanRequest(constraints=constraints, memory_budget_bytes=budget)
    return make_plan(problem.given, problem.cluster, asked)
