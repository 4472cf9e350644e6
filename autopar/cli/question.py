"""The options that the planning commands share: the model, its training, and the devices."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.status import Status

from autopar.cluster import Cluster
from autopar.errors import InputError
from autopar.planning.micro_batches import prepared_for
from autopar.planning.stages import Prepared, Request, request_of, trace_for
from autopar.plans import Plan
from autopar.precision import Precision
from autopar.sizes import parse_bytes
from autopar.sources import Source, load_source
from autopar.stopwatch import Stopwatch
from autopar.tracing import Traced

_MODEL = (
    "A name that `autopar zoo` lists (gpt2), hf:ARCHITECTURE (hf:GPT2LMHeadModel), or module:function that returns a "
    "model, or (model, meta_args), or (model, meta_args, loss_fn)."
)
_CONSTRAINT = (
    "ddp, fsdp, tp, fsdp+tp, hsdp, with options as in 'fsdp(zero=2)'; a role of an axis ('axis:tp = tp'); or a layout "
    "by name ('param:*.weight = S0,R'; != forbids, ~ prefers it). May be repeated."
)
_BATCH = "Sequences or images of one optimizer step, over all devices; for models without examples of their own."
_MICRO_BATCHES = (
    "Backward passes of one optimizer step. Of several (1,2,4) the fastest is taken; examples are then of a whole step."
)
_TIME_LIMIT = (
    "Seconds for the solver: CPU time between its steps, wall-clock time within one. A plan that reaches the limit may "
    "differ from run to run; one that is proven optimal well before does not."
)
_CLUSTER = "The hardware: a preset (a100, h100, h200, b200, mi300x, cpu, ...) or a profile (cluster.json)."


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model trains, and on which devices."""

    batch: Annotated[int | None, typer.Option(min=1, help=_BATCH)] = None
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: what the config allows, at most 2048.")
    ] = None
    cluster: Annotated[str, typer.Option(help=_CLUSTER)] = "h100"
    memory: Annotated[
        str | None,
        typer.Option(help="Budget of one device, with unit: 70GiB. Default: the usable memory, 95 % of a GPU."),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(help="bf16, fp16, fp32, fp64 or pure-bf16. Default: bf16 on GPUs, the model's own on CPU."),
    ] = None
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, sgd-momentum, adafactor, lion or muon.")] = "adamw"
    micro_batches: Annotated[str, typer.Option(help=_MICRO_BATCHES)] = "1"
    constraint: Annotated[list[str] | None, typer.Option(help=_CONSTRAINT)] = None
    time_limit: Annotated[float, typer.Option(min=0.1, help=_TIME_LIMIT)] = 60
    compiled: Annotated[bool, typer.Option("--compiled", help="Price the model as torch.compile fuses it.")] = False
    solver: Annotated[str, typer.Option(help="highs, or cbc, which is slower.")] = "highs"

    @property
    def counts(self) -> int | tuple[int, ...]:
        """The number of micro-batches, or several numbers to choose from."""
        if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", self.micro_batches):
            raise InputError(
                f"--micro-batches {self.micro_batches!r}: write a number, 1 or more, or several, like 1,2,4"
            )
        first, *others = map(int, self.micro_batches.split(","))
        return (first, *others) if others else first

    @property
    def one_count(self) -> int:
        """The number of micro-batches, for commands that do not choose among several; InputError for several."""
        if isinstance(self.counts, int):
            return self.counts
        raise InputError(
            f"--micro-batches {self.micro_batches} is several: plan, compare, search and check choose among them, this "
            "takes one number"
        )

    def on(self, cluster: Cluster) -> Request:
        """The planner's request. It parses the memory budget, before a model is built; of several numbers of
        micro-batches it has the first."""
        counts = self.counts
        return request_of(
            cluster,
            memory_budget=parse_bytes(self.memory) if self.memory is not None else None,
            precision=self.precision,
            micro_batches=counts if isinstance(counts, int) else counts[0],
            optimizer=self.optimizer,
            constraints=tuple(self.constraint or ()),
            time_limit=self.time_limit,
            compiled=self.compiled,
            solver=self.solver,
        )

    def source_of(self, model: str, config: Path | None = None) -> Source:
        """The model that `model` names, on the meta device, with examples of one micro-batch.

        If there are several numbers of micro-batches to choose from, the examples are of a step's whole batch.
        """
        batch, count = self.batch, self.counts if isinstance(self.counts, int) else 1
        if batch is not None and batch % count:
            raise InputError(f"a batch of {batch} does not divide into {count} micro-batches")
        examples = batch // count if batch is not None else None
        return load_source(model, batch=examples, sequence=self.seq, config=config)


@dataclass(frozen=True, kw_only=True)
class Question(Training):
    """A model and its training."""

    model: Annotated[str, typer.Argument(help=_MODEL, metavar="MODEL", show_default=False)]
    config: Annotated[Path | None, typer.Option(help="Hugging Face config (JSON) for hf:ARCHITECTURE.")] = None

    def source(self) -> Source:
        return self.source_of(self.model, self.config)


@dataclass(frozen=True, kw_only=True)
class MeshQuestion(Question):
    """A model, its training and a mesh."""

    mesh: Annotated[
        str, typer.Option(help="Devices along each mesh axis, slowest first: 8, 4x8, 2x4x8.", show_default=False)
    ]
    axis_names: Annotated[str | None, typer.Option(help="Names of the mesh axes: dp,tp.")] = None

    def request(self) -> Request:
        return self.on(cluster_of(self.cluster, self.mesh, self.axis_names))


@dataclass(frozen=True, kw_only=True)
class PlanQuestion(Question):
    """A model and its training, on a mesh that is given or that of a saved plan."""

    mesh: Annotated[
        str | None,
        typer.Option(
            help="Devices along each mesh axis, slowest first: 8, 4x8, 2x4x8. With --plan: the plan's.",
            show_default=False,
        ),
    ] = None
    axis_names: Annotated[str | None, typer.Option(help="Names of the mesh axes: dp,tp.")] = None

    def on_mesh(self, loaded: Plan | None) -> MeshQuestion:
        """The same question on the given mesh or, without one, on that of the plan."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.mesh is None and loaded is None:
            raise InputError("--mesh is missing: write the devices along each axis, like 8 or 4x8; or name a --plan")
        mesh = self.mesh if self.mesh is not None or loaded is None else "x".join(map(str, loaded.mesh_shape))
        return MeshQuestion(**{**options, "mesh": mesh})


def asks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command whose first parameter is a dataclass of options: typer sees the dataclass' fields instead."""
    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(command, include_extras=True)
    kind: type[Training] = hints[next(iter(inspect.signature(command).parameters))]
    annotations = get_type_hints(kind, include_extras=True)
    required = [f.name for f in fields(kind) if f.default is MISSING]
    defaults = {f.name: inspect.Parameter.empty if f.name in required else f.default for f in fields(kind)}
    order = [*required, *(name for name in defaults if name not in required)]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotations[name])
        for name in order
    ]
    parameters += [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(p.name, p.annotation)) for p in own
    ]

    def run(**options: Any) -> Any:
        question = kind(**{name: options.pop(name) for name in defaults})
        return command(question, **options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def traced_source(question: Question, request: Request, status: Status, watch: Stopwatch) -> tuple[Source, Traced]:
    """Build the model and trace it, with the loss function that its source may bring."""
    status.update("building the model ...")
    source = question.source()
    status.update("tracing ...")
    return source, trace_for(source.model, source.meta_args, None, with_loss(request, source), watch)


def with_loss(request: Request, source: Source) -> Request:
    return replace(request, loss_fn=source.loss_fn)


def prepared(question: Question, request: Request, status: Status) -> Prepared:
    """Do all work before the first solve, and report progress."""
    assert question.one_count == request.micro_batches  # `one_count` raises for several numbers
    [only] = each_prepared(question, request, status)
    return only


def each_prepared(question: Question, request: Request, status: Status) -> Iterator[Prepared]:
    """As `prepared`, for each number of micro-batches."""
    status.update("building the model ...")
    source = question.source()
    request_with_loss = with_loss(request, source)

    def starting(count: int) -> None:
        status.update("tracing ..." if isinstance(question.counts, int) else f"tracing for {count} micro-batches ...")

    for ready in prepared_for(question.counts, source.model, source.meta_args, None, request_with_loss, starting):
        status.update("solving ...")
        yield ready


def mesh_shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise InputError(f"--mesh {text!r} is no mesh: write the devices along each axis, like 8 or 4x8")
    return tuple(map(int, text.split("x")))


def axis_words(text: str | None) -> tuple[str, ...] | None:
    return tuple(part.strip() for part in text.split(",")) if text is not None else None


def cluster_of(name: str, mesh: str, axis_names: str | None) -> Cluster:
    """The preset or profile `name` on the mesh."""
    shape, names = mesh_shape(mesh), axis_words(axis_names)
    if not name.endswith(".json"):
        return Cluster.preset(name, shape, names)
    loaded = Cluster.load(name)
    if loaded.shape != shape or (names is not None and loaded.axis_names != names):
        mesh_text = "x".join(map(str, loaded.shape))
        raise InputError(
            f"the profile {name} was measured on a mesh of {mesh_text} ({', '.join(loaded.axis_names)}): ask for that "
            "one, or measure this one"
        )
    return loaded


def answered_by(question: MeshQuestion, loaded: Plan, *, memory_too: bool = False) -> tuple[MeshQuestion, Request]:
    """Take the training options from a saved plan, including those that the command line does not give.

    InputError if an option that is given differs from the plan, so that no option is silently ignored. `memory_too`:
    also for --memory, for commands in which it has no other use.
    """
    own_request, default = question.request(), {f.name: f.default for f in fields(question)}
    check_mesh(loaded, own_request.cluster)
    cluster = Cluster.from_dict(loaded.cluster) if loaded.cluster else own_request.cluster
    counts = question.counts if isinstance(question.counts, tuple) else (question.counts,)
    precision = Precision.from_dict(loaded.precision)
    other = {
        "cluster": _unnamed(own_request.cluster) != _unnamed(cluster),
        "memory": memory_too and own_request.memory_budget_bytes != loaded.memory_budget_bytes,
        "precision": own_request.precision != precision,
        "optimizer": own_request.optimizer != loaded.optimizer,
        "micro_batches": loaded.micro_batches not in counts,
        "constraint": own_request.constraints != loaded.constraints,
        "compiled": own_request.compiled != loaded.compiled,
    }
    for name, differs in other.items():
        if differs and getattr(question, name) != default[name]:
            raise InputError(
                f"--{name.replace('_', '-')} differs from what the plan was made for: leave it out, or plan "
                "again with it"
            )
    request = replace(
        own_request,
        cluster=cluster,
        precision=precision,
        optimizer=loaded.optimizer,
        micro_batches=loaded.micro_batches,
        constraints=loaded.constraints,
        inputs=loaded.inputs,
        compiled=loaded.compiled,
    )
    return replace(question, micro_batches=str(loaded.micro_batches)), request


def _unnamed(cluster: Cluster) -> Cluster:
    """The cluster with numbered axes, to compare clusters whatever names their axes have."""
    return replace(cluster, axes=tuple(replace(axis, name=str(i)) for i, axis in enumerate(cluster.axes)))


def check_mesh(loaded: Plan, cluster: Cluster) -> None:
    """InputError if the saved plan is for a mesh of another shape."""
    if cluster.shape != tuple(loaded.mesh_shape):
        mesh_text, plan_mesh_text = ("x".join(map(str, shape)) for shape in (cluster.shape, loaded.mesh_shape))
        raise InputError(f"the plan is for a mesh of {plan_mesh_text}, not of {mesh_text}: plan again for this mesh")
