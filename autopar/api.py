"""The public calls: `plan`, `compare`, `search` and `simulate` only plan, `autoparallelize` also runs the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import Unpack

from autopar.arguments.checks import check_names, count_of, module_of
from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.fingerprints.code_version import code_version
from autopar.fingerprints.fingerprint import check_fingerprints, fingerprints
from autopar.plan_forms.checks import check_on_graph, check_options
from autopar.planning.comparison import alternatives, check_comparison
from autopar.planning.comparison import tradeoff as budget_ladder
from autopar.planning.later_calls import request_beside, trace_first
from autopar.planning.leaf_requests import warn_of_leaves
from autopar.planning.mesh_search import MeshResult, factorisations, planned_meshes, ranked
from autopar.planning.micro_batches import fastest, prepared_for
from autopar.planning.on_ranks import PlannerOnRanks
from autopar.planning.simulation import simulated, streams
from autopar.planning.stages import CommonOptions, LossFunction, options_of, prepare, request_of, trace_for
from autopar.plans import Plan
from autopar.precision import Precision
from autopar.python.collecting import collection_paused
from autopar.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.cost.simulated import Simulated


def plan(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    mesh: DeviceMesh | Cluster,
    *,
    memory_budget: int | str | None = None,
    precision: Precision | str | torch.dtype | None = None,
    micro_batches: int | Sequence[int] = 1,
    optimizer: str = "adamw",
    constraints: str | Sequence[str] = (),
    concrete_args: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    inputs: str = "global",
    time_limit: float = 60,
    compiled: bool = False,
    solver: str = "highs",
) -> Plan:
    """Decide how to train `model` on `mesh`; needs no GPU, no process group and no memory for weights.

    Args:
        model: any module; it may be on the meta device.
        meta_args: examples of the inputs by name (real or meta tensors); shapes are those of one
            micro-batch of the whole mesh (the global batch divided by `micro_batches`).
        mesh: a `DeviceMesh`, or a `Cluster` for hardware that is not here.
        memory_budget: peak allocated bytes per device ("70GiB" or an int); None: the device's memory, 95 % of a GPU's.
        precision: "bf16", "fp32", ..., a dtype or a `Precision`; None: bf16 compute with fp32 parameters
            on GPUs, the model's own dtypes on CPU.
        micro_batches: backward passes per optimizer step. Of several numbers the fastest is taken; `meta_args` are then
            of the whole batch of a step, which each number must divide.
        optimizer: "adamw", "sgd", "sgd-momentum", "adafactor", "lion" or "muon": whose state and step are counted.
        constraints: a preset ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp", with options: "fsdp(zero=2)"), roles of axes
            ("axis:tp = tp"), layouts pinned, forbidden or preferred by name pattern (`"param:*.weight != R"`; see
            `solver.constraints.schemes` and `solver.constraints.pins`), or `leaf:PATTERN`: modules at these paths, or
            functions of the model that cannot be traced, are one op each, which every rank runs whole, or on its rows
            where these never meet.
        concrete_args: inputs fixed to these values, which are then constants of the graph.
        loss_fn: `loss_fn(output, **extra)`; `extra` are further inputs, named in `meta_args`.
        inputs: "global" (every rank passes the whole batch) or "local" (each rank its part).
        time_limit: CPU seconds for the solver. At the limit, the best plan so far is taken, with its gap; it may differ
            from run to run. If no plan fits, the search for the smallest budget that has one takes about as long again.
        compiled: price chains of pointwise ops as `torch.compile` fuses them; compiling the model is up to the caller.
        solver: "highs", or "cbc", which is slower, and is also used where `highspy` is not installed.

    Raises:
        InputError: an argument is unknown or malformed.
        UntraceableError: the model cannot be put in a graph, or more than a tenth of its FLOPs are in modules whose
            control flow depends on data.
        InfeasibleError: no plan fits; it names the smallest budget that the planner finds one for.
    """
    options = memory_budget, precision, 1, optimizer, constraints, loss_fn, inputs, time_limit, compiled, solver
    request = request_of(mesh, *options)
    with collection_paused():
        _, chosen = fastest(prepared_for(micro_batches, model, meta_args, concrete_args, request))
    return chosen


def compare(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    mesh: DeviceMesh | Cluster,
    *,
    against: str | Sequence[str] | None = None,
    tradeoff: int = 0,
    micro_batches: int | Sequence[int] = 1,
    concrete_args: Mapping[str, Any] | None = None,
    **options: Unpack[CommonOptions],
) -> Plan:
    """The plan of `plan`, with known schemes in `comparison`, planned for the same cluster under the same budget.

    `against`: presets ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp"; default: all that the mesh has axes for), or pins; the
    cost of the best plan with a pin shows why the plan is different. `tradeoff`: for how many other budgets to plan,
    from the smallest that has a plan. Other arguments and errors as in `plan`. The model is traced once. Of several
    numbers of `micro_batches` the fastest is found first, and used for everything else.
    """
    check_names("compare", options, CommonOptions.__annotations__)
    names = check_comparison(against, tradeoff)
    request = request_of(mesh, **options)
    prepared, chosen = fastest(prepared_for(micro_batches, model, meta_args, concrete_args, request))
    return replace(
        chosen,
        streams=streams(prepared, chosen),
        comparison=tuple(alternatives(prepared, names)),
        tradeoff=tuple(budget_ladder(prepared, tradeoff)) if tradeoff else (),
    )


def search(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    preset: str,
    devices: int,
    *,
    most_axes: int = 2,
    micro_batches: int | Sequence[int] = 1,
    concrete_args: Mapping[str, Any] | None = None,
    **options: Unpack[CommonOptions],
) -> list[MeshResult]:
    """Plan every mesh of `devices` devices of a cluster preset ("h100", "a100", "cpu"): fastest plan first.

    Every factorisation into up to `most_axes` axes is planned, from one trace for each number of `micro_batches`. Other
    arguments and errors as in `plan`, except that a mesh on which nothing fits, or with too few axes for a constraint,
    is a result without a plan.
    """
    check_names("search", options, CommonOptions.__annotations__)
    count_of("most_axes", most_axes)
    count_of("devices", devices)
    request = request_of(Cluster.preset(preset, (devices,)), **options)
    ready = list(prepared_for(micro_batches, model, meta_args, concrete_args, request))
    return ranked(list(planned_meshes(ready, preset, list(factorisations(devices, most_axes)))))


def simulate(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    plan: Plan,
    *,
    concrete_args: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
) -> Simulated:
    """One step of `plan` as events on a compute stream and a communication stream for each mesh axis.

    `model` and the examples must be those of the plan. `autopar.report.streams` draws the result and exports a Chrome
    trace. Raises PlanMismatchError for a plan of another model or graph.
    """
    plan = Plan.checked(plan)
    request = request_of(
        Cluster.from_dict(plan.cluster),
        precision=Precision.from_dict(plan.precision),
        micro_batches=plan.micro_batches,
        constraints=plan.constraints,
        loss_fn=loss_fn,
        inputs=plan.inputs,
        compiled=plan.compiled,
    )
    watch = Stopwatch()
    traced = trace_for(model, meta_args, concrete_args, request, watch)
    return simulated(prepare(model, traced, request, watch), plan)


def autoparallelize(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    device_mesh: DeviceMesh,
    *,
    plan: Plan | None = None,
    memory_budget: int | str | None = None,
    precision: Precision | str | torch.dtype | None = None,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    constraints: str | Sequence[str] = (),
    concrete_args: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    inputs: str = "global",
    time_limit: float = 60,
    compiled: bool = False,
    solver: str = "highs",
) -> nn.Module:
    """Plan `model` for `device_mesh` and make it run the plan; called on every rank.

    The model stays the same object; its parameters become `DTensor`s, so build the optimizer afterwards. Every rank
    traces, only rank 0 solves. With a `plan`, nothing is solved: `micro_batches`, `inputs`, `precision` and `optimizer`
    are the plan's. The other options are then for later calls of another kind, whose `memory_budget` and `constraints`
    are by default the plan's. A call without the arguments of `loss_fn` returns the model's own output. Weights and
    buffers are those of rank 0; what is on the meta device gets its values later, from `autopar.materialise` or
    `autopar.load_weights`.

    Arguments and errors as in `plan`, and `PlanMismatchError` (on every rank) when the plan belongs to another model,
    graph or mesh, when it has other micro-batches, inputs or optimizer than the arguments, or when the ranks disagree.
    """
    from autopar.runtime.application import apply, check_unplanned, check_world
    from autopar.runtime.calling.calls import description
    from autopar.runtime.ranks.agreement import agree, waiting_told

    if not hasattr(device_mesh, "device_type"):
        raise InputError(
            f"device_mesh is of {type(device_mesh).__name__}: running needs a DeviceMesh, as init_device_mesh makes it"
        )
    device = torch.device(device_mesh.device_type)
    error: Exception | None = None
    digests: dict[str, str] = {}
    watch = Stopwatch()
    try:
        check_unplanned(module_of(model))
        check_world(device_mesh)
        if plan is not None:
            check_options(Plan.checked(plan), tuple(device_mesh.shape), micro_batches, inputs, optimizer)
            micro_batches, inputs, optimizer = plan.micro_batches, plan.inputs, plan.optimizer
            precision = Precision.from_dict(plan.precision)
        request = request_of(
            device_mesh,
            memory_budget,
            precision,
            micro_batches,
            optimizer,
            constraints,
            loss_fn,
            inputs,
            time_limit,
            compiled,
            solver,
        )
        if plan is not None:
            request = request_beside(plan, request)
        traced = trace_first(model, meta_args, concrete_args, request, watch)
        examples = {"the shapes and dtypes of the examples": description(module_of(model), (), meta_args)}
        digests = examples | fingerprints(model, traced.graph, tuple(device_mesh.shape))
        if plan is not None:
            check_fingerprints(plan.fingerprints, digests)
            check_on_graph(plan, traced.graph)
            warn_of_leaves(traced.graph, traced.failures, request.constraints)
        digests["the code (autopar, torch, Python or the files of the model's classes)"] = code_version(model)
        digests["whether a plan is given"] = str(plan is not None)
        digests.update(options_of(request))
    except Exception as problem:  # every rank must learn of it before any of them waits for a collective
        error = problem
    with waiting_told("autoparallelize"):
        agree(device, digests, error)

    planner = PlannerOnRanks(traced, request, device)
    chosen = plan if plan is not None else planner.plan(model, traced, watch)
    return apply(model, traced, chosen, device_mesh, replan=planner.replan)
