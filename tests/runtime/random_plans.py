"""Ranks that run random plans: random strategies for all ops, random segments and random storage."""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.fingerprints.fingerprint import fingerprint
from autopar.graph import VAL, output_tensors, target_name
from autopar.plans import Certificate, NodePlan, ParameterPlan, Plan, PlanSize, Prediction, Segment
from autopar.runtime.application import apply
from autopar.strategies import strategies_for
from autopar.tracing import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
import models
from promotion import Promotion

STEPS = 2


def random_plan(
    graph: fx.Graph, root: nn.Module, mesh_shape: tuple[int, ...], draw: random.Random, *, split: str = ""
) -> Plan:
    """A random valid plan. `split` names a factor and a number of axes ("t+e 2", default 1): ops that can split this
    factor on at least that many axes do so."""
    wanted, _, axes = split.partition(" ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of ops without a rule, which are replicated
        strategies = strategies_for(graph, mesh_shape)
    trainable = {name: p.requires_grad for name, p in root.named_parameters()}
    plainness = draw.choice((0.0, 0.3, 0.7))
    planned, parameters = [], []
    for position, node in enumerate(graph.nodes):
        if node not in strategies:
            continue
        choices = strategies[node]
        asked = [way for way in choices if wanted and way.factors.count(wanted) >= int(axes or 1)]
        chosen = draw.choice(asked) if asked else choices[0] if draw.random() < plainness else draw.choice(choices)
        shapes = tuple(tuple(t.shape) for t in output_tensors(node))
        planned.append(
            NodePlan(
                position,
                node.name,
                target_name(node),
                "",
                chosen.inputs,
                chosen.outputs,
                shapes,
                chosen.factors,
                chosen.local,
            )
        )
        if node.op == "get_attr" and node.target in trainable:
            storage, dtype = chosen.outputs[0], str(node.meta[VAL].dtype)
            regather = draw.random() < 0.3
            parameters.append(ParameterPlan(node.target, shapes[0], dtype, storage, trainable[node.target], regather))
    return Plan(
        mesh_shape=mesh_shape,
        axis_names=tuple(f"axis{i}" for i in range(len(mesh_shape))),
        cluster={},
        fingerprints={"graph": fingerprint(graph), "model": "", "mesh": "x".join(map(str, mesh_shape))},
        precision={},
        micro_batches=1,
        optimizer="adamw",
        inputs="global",
        memory_budget_bytes=None,
        constraints=(),
        nodes=tuple(planned),
        parameters=tuple(parameters),
        recompute=_segments(graph, draw),
        collectives=(),
        predicted=Prediction(0, 0, 0, 0, 0, 0, {}, (), 0),
        certificate=Certificate("drawn", 0, 0, 0, ""),
        size=PlanSize(len(graph.nodes), 0, 0, 0),
        planning_seconds={},
    )


def _segments(graph: fx.Graph, draw: random.Random) -> tuple[Segment, ...]:
    """Up to three disjoint ranges of the graph."""
    inner = [i for i, node in enumerate(graph.nodes) if node.op not in ("placeholder", "output")]
    cuts = sorted(draw.sample(inner, min(2 * draw.choice((0, 1, 3)), len(inner) // 2 * 2)))
    spans = [(a, b - 1) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a < b]
    return tuple(Segment(first, last, "", inner=draw.random() < 0.5) for first, last in spans)


@functools.lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def trained(name: str, model: nn.Module, loss: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        value = loss(models.batch(name, step, torch.float64))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@functools.lru_cache
def alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = models.build(name, torch.float64)
    return trained(name, model, lambda inputs: models.reference_loss(name, model, inputs)), dict(model.state_dict())


def equals_one_process(name: str, shape: tuple[int, ...], seeds: range) -> dict[str, float]:
    """The largest deviation of losses, parameters and buffers from one process, for each seed."""
    found = {}
    with Promotion():
        losses_alone, state_alone = alone(name)
        for seed in seeds:
            model = models.build(name, torch.float64)
            traced: Any = trace(model, models.batch(name, 0, torch.float64), loss_fn=models.CASES[name].loss_fn)
            plan = random_plan(traced.graph, model, shape, random.Random(seed))
            apply(model, traced, plan, mesh_of(shape), replan=_no_replan)

            def loss(inputs: dict[str, torch.Tensor], model: nn.Module = model) -> torch.Tensor:
                output = model(**inputs)
                return output if isinstance(output, torch.Tensor) else output.loss

            losses = trained(name, model, loss)
            state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
            errors = [abs(a - b) for a, b in zip(losses, losses_alone, strict=True)]
            errors += [(state[k] - v).abs().max().item() for k, v in state_alone.items() if v.numel()]
            found[str(seed)] = max(errors)
    return found


def _no_replan(*_: Any) -> Any:
    raise AssertionError("every call is alike")


SMALL = ("mlp", "resnet")
LARGE = ("gpt2", "llama", "bert", "vit", "t5")


def cases(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], seeds: range) -> dict[str, Callable[[], Any]]:
    return {
        f"{name}-{'x'.join(map(str, shape))}": functools.partial(equals_one_process, name, shape, seeds)
        for name in names
        for shape in shapes
    }


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: cases(SMALL, ((2,),), range(6)) | cases(LARGE, ((2,),), range(4)),
    4: cases(SMALL, ((4,), (2, 2)), range(3)) | cases(LARGE, ((2, 2),), range(2)),
}
