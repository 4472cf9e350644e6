"""Hand-made traces and plans, which test the runtime without tracer, rules and solver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.states import State
from autopar.errors import InputError
from autopar.fingerprints.fingerprint import fingerprint
from autopar.graph import BIAS_OF, VAL, output_tensors, target_name, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.plans import Bucket, Certificate, NodePlan, ParameterPlan, Plan, PlanSize, Prediction, Segment
from autopar.resharding.reshard import steps
from autopar.tracing.model_state.plain_reads import PlainValues


class Net(nn.Module):
    """Three layers with separate bias additions; the loss is a sum, so that every part of it can be partial."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 2 * width), nn.Linear(2 * width, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = functional.linear(x, self.up.weight) + self.up.bias
        h = torch.tanh(h)
        h = functional.linear(h, self.down.weight) + self.down.bias
        h = torch.tanh(h)
        y = functional.linear(h, self.head.weight) + self.head.bias
        error = y * self.scale - target
        return (error * error).sum()


BATCH = 8


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(BATCH, 8, dtype=torch.float64, generator=generator),
        "target": torch.randn(BATCH, 4, dtype=torch.float64, generator=generator),
    }


@dataclass
class HandTraced:
    """The result of `torch.fx.symbolic_trace`, with the annotations that the runtime reads."""

    graph: fx.Graph
    root: nn.Module
    own_key: Hashable
    names: tuple[str, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    loss_names: tuple[str, ...] = ()
    entry: Entry = FORWARD
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    numbers_read: Mapping[str, int | float] = field(default_factory=dict)
    states: Mapping[str, State] = field(default_factory=dict)
    set_outputs: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    reads_values: bool = False
    reads_memory: bool = False
    other_keys: list[Hashable] = field(default_factory=list)
    plain_values: PlainValues = field(default_factory=lambda: PlainValues({}))

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any], model: nn.Module) -> Hashable:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        shapes = tuple(tuple(v.shape) for v in given.values() if isinstance(v, torch.Tensor))
        return model.training, torch.is_grad_enabled(), shapes

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for node in self.graph.find_nodes(op="placeholder"):
            if given[node.name].shape != node.meta[VAL].shape:
                raise InputError(f"input '{node.name}' was traced with shape {tuple(node.meta[VAL].shape)}")
        return [given[name] for name in self.names]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        return leaves[0]

    def set_on(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        """Does nothing: no forward here sets attributes."""


def trace(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], *, last: str | None = None, dtype: torch.dtype | None = None
) -> HandTraced:
    """`last`: name of the node to return instead of the loss; `dtype` of parameters and inputs in the graph."""
    graph = fx.Tracer().trace(model)
    if last is not None:
        [output] = graph.find_nodes(op="output")
        output.args = (next(node for node in graph.nodes if node.name == last),)
        graph.eliminate_dead_code()
    made: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            value: Any = torch.empty_like(inputs[node.name], device="meta", dtype=dtype)
        elif node.op == "get_attr":
            path, _, name = node.target.rpartition(".")
            real = getattr(model.get_submodule(path), name)
            value = torch.empty(real.shape, dtype=dtype or real.dtype, device="meta", requires_grad=real.requires_grad)
        elif node.op == "output":
            node.args = ((node.args[0],),)
            value = None
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            value = (
                getattr(args[0], node.target)(*args[1:], **kwargs)
                if node.op == "call_method"
                else node.target(*args, **kwargs)
            )
        made[node] = node.meta[VAL] = value
        if node.name.startswith("add") and node.args[0].target is functional.linear:
            node.meta[BIAS_OF] = node.args[0]
    traced = HandTraced(graph, model, None, tuple(inputs))
    traced.own_key = traced.key((), inputs, model)
    return traced


# For each op in order: the layouts of inputs and output on one axis; then the storage of the parameters.
_DATA = {
    "linear": "S0 R+ -> S0", "add": "S0 R+ -> S0", "tanh": "S0 -> S0",
    "linear_1": "S0 R+ -> S0", "add_1": "S0 R+ -> S0", "tanh_1": "S0 -> S0",
    "linear_2": "S0 R+ -> S0", "add_2": "S0 R+ -> S0", "mul": "S0 R -> S0", "sub": "S0 S0 -> S0",
    "mul_1": "S0 S0 -> S0", "sum_1": "S0 -> P",
}  # fmt: skip
_TENSOR = {
    "linear": "R+ S0 -> S1", "add": "S1 S0 -> S1", "tanh": "S1 -> S1",
    "linear_1": "S1 S1 -> P", "add_1": "R R -> R", "tanh_1": "R -> R",
    "linear_2": "R R -> R", "add_2": "R R -> R", "mul": "R R -> R", "sub": "R R -> R",
    "mul_1": "R R -> R", "sum_1": "R -> R",
}  # fmt: skip
_STORED_WHOLE: dict[str, str] = {}
_STORED_SHARDED = {"up.weight": "S1", "down.weight": "S0", "head.weight": "S0", "down.bias": "S0", "head.bias": "S0"}
_STORED_TENSOR = {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1"}
STYLES = {
    "dp": (_DATA, _STORED_WHOLE),
    "fsdp": (_DATA, _STORED_SHARDED),
    "tp": (_TENSOR, _STORED_TENSOR),
}


def plan(
    traced: HandTraced,
    mesh_shape: tuple[int, ...],
    styles: Sequence[str],
    *,
    recompute: Sequence[tuple[str, str]] = (),
    regather: bool = False,
    precision: Mapping[str, str | None] | None = None,
    output: str = "R",
    inputs: str = "global",
    micro_batches: int = 1,
    buckets: Sequence[Bucket] = (),
) -> Plan:
    """One style for each axis. `recompute`: segments by names of first and last nodes; `output`: placement by axis."""
    nodes = list(traced.graph.nodes)
    position = {node.name: i for i, node in enumerate(nodes)}
    kinds = [STYLES[style] for style in styles]

    def layouts(texts: list[list[str]]) -> tuple[Layout, ...]:
        return tuple(_layout(one, mesh_shape) for one in zip(*texts, strict=True))

    planned = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            ins: tuple[Layout, ...] = ()
            given = "S0" if inputs == "local" else "R"
            stored = [kind[1].get(str(node.target), "R") if node.op == "get_attr" else given for kind in kinds]
            outs: tuple[Layout, ...] = (_layout(stored, mesh_shape),)
        else:
            texts = [[output] if node.op == "output" else kind[0][node.name].split("->") for kind in kinds]
            ins = layouts([text[0].split() for text in texts])
            outs = layouts([text[1].split() for text in texts]) if len(texts[0]) > 1 else ()
        shapes = tuple(tuple(t.shape) for t in output_tensors(node))
        factors = ("",) * len(mesh_shape)
        planned.append(NodePlan(position[node.name], node.name, target_name(node), "", ins, outs, shapes, factors))
    parameters = tuple(
        ParameterPlan(
            str(node.target),
            tuple(node.meta[VAL].shape),
            str(node.meta[VAL].dtype),
            _layout([kind[1].get(str(node.target), "R") for kind in kinds], mesh_shape),
            True,
            regather,
        )
        for node in nodes
        if node.op == "get_attr" and node.meta[VAL].requires_grad
    )
    return Plan(
        mesh_shape=mesh_shape,
        axis_names=tuple(f"axis{i}" for i in range(len(mesh_shape))),
        cluster={},
        fingerprints={"graph": fingerprint(traced.graph), "model": "", "mesh": "x".join(map(str, mesh_shape))},
        precision=precision or {},
        micro_batches=micro_batches,
        optimizer="adamw",
        inputs=inputs,
        memory_budget_bytes=None,
        constraints=(),
        nodes=tuple(planned),
        parameters=parameters,
        recompute=tuple(Segment(position[a], position[b], f"{a}..{b}") for a, b in recompute),
        collectives=(),
        predicted=Prediction(0, 0, 0, 0, 0, 0, {}, (), 0),
        certificate=Certificate("by hand", 0, 0, 0, ""),
        size=PlanSize(len(nodes), 0, 0, 0),
        planning_seconds={},
        buckets=tuple(buckets),
    )


def _layout(texts: Sequence[str], mesh_shape: tuple[int, ...]) -> Layout:
    """The layout of one placement for each axis; if two shard one dim, the later axis splits the earlier's shards."""
    placements = []
    for axis, text in enumerate(texts):
        outer = math.prod(n for n, earlier in zip(mesh_shape, texts[:axis], strict=False) if earlier == text)
        placements.append(f"{text}@{outer}" if text.startswith("S") and outer > 1 else text)
    return Layout.parse(",".join(placements))


def announced(traced: HandTraced, plan: Plan) -> dict[str, list[int]]:
    """Number and bytes of collectives according to the plan's recipes, by kind and axis.

    Forward collectives count twice in a segment, and for a weight that is regathered because a linear layer saves it.
    """
    nodes = list(traced.graph.nodes)
    by_node = {nodes[p.position]: p for p in plan.nodes}
    segment = {n: s.first for s in plan.recompute for n in nodes[s.first : s.last + 1]}
    calls: Counter[str] = Counter()
    volume: Counter[str] = Counter()
    seen = set()
    regather = {p.name for p in plan.parameters if p.regather}
    for node in nodes:
        for ref, layout in zip(tensor_inputs(node), by_node[node].inputs if node in by_node else (), strict=False):
            data, scope = tensor_of(ref), segment.get(node)
            wanted = layout if data.requires_grad else layout.value()
            if (ref, wanted, scope) in seen:
                continue
            seen.add((ref, wanted, scope))
            source = by_node[ref.node].outputs[ref.index]
            saved = node.target is functional.linear and ref.node.target in regather and _needs_grad(node.args[0])
            times = 2 if scope is not None or saved else 1
            for step in steps(source, wanted, tuple(data.shape), plan.mesh_shape, needs_grad=data.requires_grad):
                moves = [step.forward] * times + [step.backward] * data.requires_grad
                for move in moves:
                    if move is not None:
                        key = f"{move.kind}@{move.axis}"
                        calls[key] += 1
                        volume[key] += move.elements * data.element_size()
    return {key: [calls[key], volume[key]] for key in sorted(calls)}


def _needs_grad(node: Any) -> bool:
    return bool(node.meta[VAL].requires_grad)
