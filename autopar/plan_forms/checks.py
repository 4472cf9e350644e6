"""Consistency checks of a plan that was read from a file, which somebody may have edited.

Layouts must fit shapes and mesh, indices and names must refer to existing things, and figures must add up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.cluster import Cluster
from autopar.errors import InputError, PlanMismatchError
from autopar.graph import is_getitem, output_tensors, target_name, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.precision import Precision

if TYPE_CHECKING:
    from torch import fx

    from autopar.plans import Plan


def damage(plan: Plan) -> str:
    """Describe the first inconsistency in the plan; "" if there is none."""
    for check in (_mesh, _training, _nodes, _parameters, _segments, _buckets, _collectives, _figures):
        for message in check(plan):
            return message
    return ""


def check_options(plan: Plan, mesh_shape: tuple[int, ...], micro_batches: int, inputs: str, optimizer: str) -> None:
    """Raise PlanMismatchError if the plan is for another mesh, or if an argument that is not the default differs from
    the plan's own option."""
    if tuple(plan.mesh_shape) != mesh_shape:
        raise PlanMismatchError(
            f"the plan is for a mesh of {'x'.join(map(str, plan.mesh_shape))}, this one is "
            f"{'x'.join(map(str, mesh_shape))}: plan again for this mesh"
        )
    options = {
        "micro_batches": (micro_batches, 1, plan.micro_batches),
        "inputs": (inputs, "global", plan.inputs),
        "optimizer": (optimizer, "adamw", plan.optimizer),
    }
    for name, (value, default, planned) in options.items():
        if value not in (default, planned):
            raise PlanMismatchError(f"the plan has {name}={planned!r}, not {value!r}: plan with that, or leave it out")


def check_on_graph(plan: Plan, graph: fx.Graph) -> None:
    """Raise PlanMismatchError if the plan's nodes do not match those of the graph with the plan's fingerprint."""
    if message := _damage_on(plan, graph):
        raise PlanMismatchError(f"the plan is damaged ({message}): take it as it was saved, or plan again")


def _damage_on(plan: Plan, graph: fx.Graph) -> str:
    nodes = list(graph.nodes)
    for entry in plan.nodes:
        if entry.position >= len(nodes):
            return f"node '{entry.name}' has position {entry.position}, and the graph {len(nodes)} nodes"
        node = nodes[entry.position]
        if target_name(node) != entry.target:
            return (
                f"node '{entry.name}' at position {entry.position} is of {entry.target}, "
                f"in the graph of {target_name(node)}"
            )
        shapes = tuple(tuple(tensor.shape) for tensor in output_tensors(node))
        if entry.shapes != shapes:
            return f"node '{entry.name}' has results of shapes {entry.shapes}, in the graph {shapes}"
        refs = tensor_inputs(node)
        if len(refs) != len(entry.inputs):
            return f"node '{entry.name}' has {len(entry.inputs)} layouts of inputs, in the graph {len(refs)} inputs"
        for i, (ref, layout) in enumerate(zip(refs, entry.inputs, strict=True)):
            for message in _unfit(f"input {i} of node '{entry.name}'", layout, plan.mesh_shape, tensor_of(ref).shape):
                return message
    planned = {entry.position for entry in plan.nodes}
    for position, node in enumerate(nodes):
        runs = node.op == "output" or (output_tensors(node) and not is_getitem(node))
        if runs and position not in planned:
            return f"it says nothing about node '{node.name}' at position {position} of the graph"
    return ""


def _mesh(plan: Plan) -> Iterator[str]:
    shape = "x".join(map(str, plan.mesh_shape))
    if not plan.mesh_shape or min(plan.mesh_shape) < 1:
        yield f"mesh_shape is {list(plan.mesh_shape)}, and every axis has 1 device or more"
    if len(plan.mesh_shape) != len(plan.axis_names) or len(set(plan.axis_names)) < len(plan.axis_names):
        yield f"its mesh of {shape} and the names of its axes, {', '.join(plan.axis_names)}, differ"
    yield from _cluster(plan)
    for missing in sorted({"graph", "mesh", "model"} - plan.fingerprints.keys()):
        yield f"fingerprints has none of the {missing}"
    if plan.fingerprints.get("mesh") != shape:
        yield f"mesh_shape is {shape}, and the fingerprint of the mesh {plan.fingerprints.get('mesh')}"


def _cluster(plan: Plan) -> Iterator[str]:
    if not plan.cluster:  # a plan that was written by hand: it can run, but has no prices
        return
    try:
        cluster = Cluster.from_dict(plan.cluster)
    except InputError as error:
        yield f"cluster: {error}"
        return
    if cluster.shape != plan.mesh_shape:
        yield f"mesh_shape is {list(plan.mesh_shape)}, and the axes of cluster have the sizes {list(cluster.shape)}"
    if cluster.axis_names != plan.axis_names:
        yield f"axis_names is {list(plan.axis_names)}, and the axes of cluster are {list(cluster.axis_names)}"


def _training(plan: Plan) -> Iterator[str]:
    if plan.micro_batches < 1:
        yield f"micro_batches is {plan.micro_batches}, and must be 1 or more"
    if plan.inputs not in ("global", "local"):
        yield f"inputs is '{plan.inputs}', and must be 'global' or 'local'"
    if plan.memory_budget_bytes is not None and plan.memory_budget_bytes < 1:
        yield f"memory_budget_bytes is {plan.memory_budget_bytes}, and must be 1 or more"
    try:
        Precision.from_dict(plan.precision)
    except (AttributeError, InputError, TypeError) as error:
        yield f"precision is {dict(plan.precision)}: {error}"


def _nodes(plan: Plan) -> Iterator[str]:
    before = -1
    for node in plan.nodes:
        if node.position <= before:
            yield f"node '{node.name}' has position {node.position}, and the one before it {before}"
        before = node.position
        if len(node.factors) != len(plan.mesh_shape):
            yield f"node '{node.name}' has {len(node.factors)} factors on {len(plan.mesh_shape)} axes"
        if len(node.outputs) != len(node.shapes) and (node.outputs or node.target != "output"):
            yield f"node '{node.name}' has {len(node.outputs)} layouts of results, and {len(node.shapes)} shapes"
        for i, layout in enumerate(node.inputs):
            yield from _unfit(f"input {i} of node '{node.name}'", layout, plan.mesh_shape, None)
        for i, (layout, shape) in enumerate(zip(node.outputs, node.shapes, strict=False)):
            yield from _unfit(f"result {i} of node '{node.name}'", layout, plan.mesh_shape, shape)


def _parameters(plan: Plan) -> Iterator[str]:
    names: set[str] = set()
    for parameter in plan.parameters:
        if parameter.name in names:
            yield f"parameter '{parameter.name}' is there twice"
        names.add(parameter.name)
        yield from _unfit(f"parameter '{parameter.name}'", parameter.storage, plan.mesh_shape, parameter.shape)
        if not parameter.storage.is_plain(plan.mesh_shape):
            yield f"parameter '{parameter.name}' is stored as {parameter.storage}, which is no storage"


def _segments(plan: Plan) -> Iterator[str]:
    last = max((node.position for node in plan.nodes), default=-1)
    for segment in plan.recompute:
        inside = -1 <= segment.replayed <= segment.last and (
            segment.replayed == -1 or segment.replayed >= segment.first
        )
        if not (0 <= segment.first <= segment.last <= last and inside):
            yield (
                f"segment '{segment.name}' goes from node {segment.first} to {segment.last}, replayed to "
                f"{segment.replayed}, and the last node is {last}"
            )
    in_order = sorted(plan.recompute, key=lambda segment: segment.first)
    for before, after in itertools.pairwise(in_order):
        if after.first <= before.last:
            yield f"segment '{after.name}' begins at node {after.first}, and '{before.name}' ends at {before.last}"


def _buckets(plan: Plan) -> Iterator[str]:
    shapes = {parameter.name: parameter.shape for parameter in plan.parameters}
    home: dict[tuple[str, Layout, int], int] = {}
    for number, bucket in enumerate(plan.buckets):
        if len(bucket.names) != len(bucket.wanted):
            yield f"bucket {number} has {len(bucket.names)} names and {len(bucket.wanted)} layouts"
        if not -1 <= bucket.segment < len(plan.recompute):
            yield f"bucket {number} is of segment {bucket.segment}, of {len(plan.recompute)} in the plan"
        for name, layout in zip(bucket.names, bucket.wanted, strict=False):
            if name not in shapes:
                yield f"bucket {number} holds '{name}', which is no parameter of the plan"
            yield from _unfit(f"'{name}' in bucket {number}", layout, plan.mesh_shape, shapes.get(name))
            if home.setdefault((name, layout, bucket.segment), number) != number:
                yield f"bucket {number} holds '{name}' as {layout}, and bucket {home[name, layout, bucket.segment]} too"


def _collectives(plan: Plan) -> Iterator[str]:
    keys: set[tuple[object, ...]] = set()
    for c in plan.collectives:
        kind, _, number = c.cause.partition(" ")
        if kind == "bucket" and not (number.isdigit() and int(number) < len(plan.buckets)):
            yield f"a collective is for '{c.cause}', of {len(plan.buckets)} buckets in the plan"
        if not 0 <= c.axis < len(plan.mesh_shape):
            yield f"a collective for '{c.cause}' is on axis {c.axis}, of {len(plan.mesh_shape)}"
        yield from _negative(f"a collective for '{c.cause}'", c, ("bytes", "count", "seconds"))
        key = c.kind, c.axis, c.bytes, c.phase, c.cause
        if key in keys:
            yield f"{c.kind} of {c.bytes} bytes on axis {c.axis} for '{c.cause}' ({c.phase}) is there twice"
        keys.add(key)


def _figures(plan: Plan) -> Iterator[str]:
    names = ("step_seconds", "compute_seconds", "comm_seconds", "recompute_seconds", "optimizer_seconds")
    yield from _negative("predicted", plan.predicted, (*names, "peak_bytes", "flops", "hidden_seconds"))
    yield from _negative("certificate", plan.certificate, ("objective", "bound", "gap"))
    parts = sum(plan.predicted.parts.values())
    if parts != plan.predicted.peak_bytes or min(plan.predicted.parts.values(), default=0) < 0:
        yield f"predicted has a peak of {plan.predicted.peak_bytes} bytes, and parts of {parts} in sum"
    comm_seconds = sum(collective.seconds for collective in plan.collectives if collective.phase != "replay")
    if not math.isclose(comm_seconds, plan.predicted.comm_seconds, rel_tol=1e-6, abs_tol=1e-12):
        yield (
            f"its collectives take {comm_seconds:.6g} s without those of replays, and predicted has comm_seconds of "
            f"{plan.predicted.comm_seconds:.6g}: some are missing, or were changed"
        )


def _negative(where: str, holder: object, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        value = getattr(holder, name)
        if not (math.isfinite(value) and value >= 0):
            yield f"{where} has {name} of {value}, and must have 0 or more"


def _unfit(where: str, layout: Layout, mesh_shape: Sequence[int], shape: Sequence[int] | None) -> Iterator[str]:
    """Report a layout that does not fit the mesh or the tensor's `shape` (None: not known)."""
    if len(layout) != len(mesh_shape):
        yield f"{where} has layout {layout}, for {len(layout)} axes, and the mesh {len(mesh_shape)}"
    elif shape is not None and not layout.is_legal(shape, mesh_shape, ragged=True):
        mesh = "x".join(map(str, mesh_shape))
        yield f"{where}, of shape {tuple(shape)}, cannot have layout {layout} on a mesh of {mesh}"
