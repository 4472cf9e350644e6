"""The stages of planning: the request, the trace, the preparation that all plans of a graph share, and a solve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import fx, nn
from typing_extensions import Unpack

from autopar.arguments.checks import count_of, flag_of, loss_of, module_of, seconds_of, solver_of, texts_of
from autopar.calls.entries import FORWARD, Entry
from autopar.calls.states import State
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InputError
from autopar.fingerprints.fingerprint import fingerprints
from autopar.layout import Layout
from autopar.plan_request import PlanRequest
from autopar.planning.claimed_device import claimed_device
from autopar.planning.data_numbers import check_numbers
from autopar.planning.failed_forward import as_untraceable
from autopar.planning.leaf_requests import asked_for, check_requests, check_shares, split_requests, warn_of_leaves
from autopar.planning.leaf_splits import find_splits
from autopar.planning.mask_notes import mask_notes
from autopar.plans import Plan
from autopar.precision import Precision
from autopar.python.collecting import collection_paused
from autopar.python.hooks_of_loops import hooks_of_loops_off
from autopar.sizes import parse_bytes
from autopar.stopwatch import Stopwatch
from autopar.tracing import Traced, trace
from autopar.tracing.leaves.tensors import show_leaf_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.cost.structure.blocks import Repeat
    from autopar.strategies.strategy import Strategy

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Request(PlanRequest):
    """What the user asked for, the same for all graphs of a model; `compiled` as in `plan`."""

    cluster: Cluster
    loss_fn: LossFunction | None = None
    compiled: bool = False


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that `plan`, `compare` and `search` have in common.

    `time_limit` applies to each solve, in CPU seconds.
    """

    memory_budget: int | str | None
    precision: Precision | str | torch.dtype | None
    optimizer: str
    constraints: str | Sequence[str]
    loss_fn: LossFunction | None
    inputs: str
    time_limit: float
    compiled: bool
    solver: str


class OtherTerms(TypedDict, total=False):
    """The terms of a `PlanRequest` that may differ between plans of one graph."""

    memory_budget_bytes: int | None
    constraints: tuple[str, ...]
    gap: float
    fold: bool


class RequestOptions(CommonOptions, total=False):
    """All options of a `Request`."""

    micro_batches: int


def request_of(
    mesh: DeviceMesh | Cluster,
    memory_budget: int | str | None = None,
    precision: Precision | str | torch.dtype | None = None,
    micro_batches: int = 1,
    optimizer: str = "adamw",
    constraints: str | Sequence[str] = (),
    loss_fn: LossFunction | None = None,
    inputs: str = "global",
    time_limit: float = 60,
    compiled: bool = False,
    solver: str = "highs",
) -> Request:
    """A `Request` from arguments as in `plan`; raises InputError for invalid ones."""
    if inputs not in ("global", "local"):
        raise InputError(f'inputs is {inputs!r}: it must be "global" or "local"')
    cluster = Cluster.of(mesh)
    return Request(
        cluster=cluster,
        precision=Precision.of(precision, cluster.device.kind),
        memory_budget_bytes=None if memory_budget is None else parse_bytes(memory_budget),
        micro_batches=count_of("micro_batches", micro_batches),
        optimizer=optimizer,
        constraints=texts_of("constraints", constraints),
        inputs=inputs,
        time_limit=seconds_of("time_limit", time_limit),
        loss_fn=loss_of(loss_fn),
        compiled=flag_of("compiled", compiled),
        solver=solver_of(solver),
    )


def options_of(request: Request) -> dict[str, str]:
    """The parsed options by their names in `plan`; every rank must have given the same ones.

    `loss_fn` is not among them: it shows in the model's graph.
    """
    compared = {"memory_budget": request.memory_budget_bytes, "precision": request.precision.to_dict()}
    names = ("micro_batches", "optimizer", "constraints", "inputs", "time_limit", "compiled", "solver")
    return {
        f"the option {name} ({value} here)": repr(value)
        for name, value in {**compared, **{name: getattr(request, name) for name in names}}.items()
    }


@collection_paused()
@hooks_of_loops_off()
def trace_for(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    concrete_args: Mapping[str, Any] | None,
    request: Request,
    watch: Stopwatch,
    *,
    bias_split: bool = True,
    without_loss: bool = False,
    later: bool = False,
    same_inputs: bool = False,
    entry: Entry = FORWARD,
    states: Mapping[State, Any] | None = None,
    set_again: Mapping[State, bool | None] | None = None,
) -> Traced:
    """Trace the model; an error of its own forward becomes an UntraceableError that names the line.

    Modules that cannot be traced, or that the constraints ask for, become leaves. `bias_split`: the addition of a bias
    is an op of its own, so that a product's partial sums can be reduced before it. `without_loss`: the call leaves out
    the inputs that only the loss needs. `later`: another kind of call, which need not contain the requested leaves. The
    other arguments are as in `trace`.
    """
    module_of(model)
    # Data-free tensors made in inference mode could not be written to. Leaving that mode turns gradients on.
    off, on = torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled())  # off in inference mode
    # a default device is a torch function mode, which intercepts every call: enter it only if needed
    cpu = nullcontext() if torch.get_default_device() == torch.device("cpu") else torch.device("cpu")
    with watch.stage("trace"), off, on, cpu:
        try:
            traced = trace(
                model,
                meta_args,
                concrete_args=concrete_args,
                device=claimed_device(model, meta_args, request.cluster.device.kind),
                bias_addition_split=bias_split,
                remove_inplace=True,
                parameter_dtype=request.precision.compute,
                loss_fn=request.loss_fn,
                without_loss=without_loss,
                same_inputs=same_inputs,
                entry=entry,
                states=states,
                set_again=set_again,
                module_leaves=asked_for(model, request.constraints),
                unsupported="leaf",
            )
        except AutoparError:
            raise
        except Exception as error:
            raise as_untraceable(error, model, request.precision.compute) from error
        show_leaf_tensors(traced, request.precision.compute)
        check_requests(model, traced.graph, () if later else request.constraints)
        find_splits(traced.graph)
    return traced


@dataclass(frozen=True)
class Prepared:
    """An annotated graph with its repeated blocks and its nodes' strategies; plans under several budgets share it."""

    model: nn.Module
    traced: Traced
    strategies: Mapping[fx.Node, Sequence[Strategy]]
    repeats: tuple[Repeat, ...]
    request: Request
    seconds: Mapping[str, float]

    @hooks_of_loops_off()
    @collection_paused()
    def solve(
        self,
        *,
        pinned: Mapping[str, Layout] | None = None,
        trained: Collection[str] = (),
        **other: Unpack[OtherTerms],
    ) -> Plan:
        """The best plan for the request, with the terms in `other` replaced.

        `pinned`: layouts of parameters that are already stored. `trained`: parameters that other graphs train.
        """
        from autopar.cost.memory.weights import buffers_of, parameters_of
        from autopar.solver import ModelGraph, make_plan
        from autopar.strategies.batch_dims import batch_dims

        request = replace(self.request, **other)
        leaves, _ = split_requests(self.request.constraints)
        _, others = split_requests(request.constraints)
        graph = ModelGraph(
            self.traced.graph,
            self.strategies,
            parameters_of(self.model),
            buffers_of(self.model),
            pinned=pinned,
            trained=trained,
            train=torch.is_grad_enabled(),
            repeats=self.repeats,
            fingerprints=fingerprints(self.model, self.traced.graph, request.cluster.shape),
        )
        chosen = make_plan(graph, request.cluster, replace(request, constraints=others))
        seconds = {**self.seconds, **chosen.planning_seconds}
        return replace(
            chosen,
            planning_seconds=seconds,
            constraints=(*leaves, *others),
            notes=mask_notes(self.traced.graph),
            compiled=request.compiled,
            batch_dims=batch_dims(self.traced.graph, self.strategies) if request.inputs == "local" else (),
        )

    def on(self, cluster: Cluster) -> Prepared:
        """The same graph on another mesh of the same devices."""
        from autopar.strategies import strategies_for

        watch = Stopwatch(dict(self.seconds))
        watch.seconds.pop("strategies", None)
        with watch.stage("strategies"):
            strategies = strategies_for(
                self.traced.graph, cluster.shape, inputs=self.request.inputs, repeats=self.repeats
            )
        return replace(
            self, strategies=strategies, request=replace(self.request, cluster=cluster), seconds=watch.seconds
        )


@collection_paused()
@hooks_of_loops_off()
def prepare(model: nn.Module, traced: Traced, request: Request, watch: Stopwatch) -> Prepared:
    """Annotate a trace and list every node's strategies.

    Raises UntraceableError where leaves that nobody asked for hold too much of the model, or an op depends on a number
    read from data; other leaves are reported by a LeafWarning.
    """
    from autopar.cost import annotate
    from autopar.cost.structure.blocks import find_repeats
    from autopar.strategies import strategies_for

    if request.inputs == "local" and max(request.cluster.shape) > 1:
        traced.guards.check_whole_inputs()
    check_numbers(traced.graph)
    with watch.stage("annotate"):
        annotate(traced.graph, request.cluster.device.kind, root=traced.root, compiled=request.compiled)
        check_shares(traced.graph, traced.failures, request.constraints)
        warn_of_leaves(traced.graph, traced.failures, request.constraints)  # leaves within the limit
    with watch.stage("strategies"):
        repeats = find_repeats(traced.graph)
        strategies = strategies_for(traced.graph, request.cluster.shape, inputs=request.inputs, repeats=repeats)
    return Prepared(model, traced, strategies, repeats, request, dict(watch.seconds))
