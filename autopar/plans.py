"""The plan: what every node of the graph does on the mesh, and the predicted cost.

The plan is the interface between planning (needs no devices) and running (under torchrun): JSON with a version and
fingerprints of graph, model and mesh. It refers to nodes by their position in the graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.arguments.text_files import path_of, write_text
from autopar.errors import InputError, LayoutError, PlanMismatchError
from autopar.layout import Layout
from autopar.plan_forms.checks import damage
from autopar.plan_forms.json_form import json_form, revived
from autopar.plan_forms.shown import Shown

VERSION = 1  # of the JSON form; plans of other versions are refused


@dataclass(frozen=True)
class NodePlan:
    """How one node runs: layouts of its tensor inputs and outputs (as in `Strategy`), and its local code.

    `factors`: for each mesh axis, the index of the op's sharding rule that the axis splits. `local`: the name of code
    that runs in place of the op on shards (`runtime.local`); "": the op itself.
    """

    position: int
    name: str
    target: str
    scope: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the outputs, global
    factors: tuple[str, ...]
    local: str = ""


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is stored between steps; its `storage` is a layout that DTensor has (`Layout.is_plain`).

    `regather`: its gathered copy is freed after forward has used it, and gathered again in backward (ZeRO-3); if False,
    the copy is kept from forward until its gradient is computed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: Layout
    trainable: bool
    regather: bool = False


@dataclass(frozen=True)
class Segment:
    """Nodes `first` to `last` (positions, inclusive), recomputed in backward from the segment's inputs.

    The replay ends after `replayed`, the segment's last node that saves a tensor for backward (-1: not known). If the
    segment is a whole block, its inputs are saved in the layouts that they have outside; if it is a part of a block
    (`inner`), in the layouts that its nodes read.
    """

    first: int
    last: int
    name: str
    replayed: int = -1
    inner: bool = False


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered by one collective before use, and whose gradients are reduced by one collective.

    Each of `names` is converted from its storage to its layout in `wanted`. The conversions, in forward and backward,
    need the same kinds of collectives over the same axes in the same order. `segment`: index in the plan of the
    recomputed segment whose nodes read the parameters (-1: none).
    """

    names: tuple[str, ...]
    wanted: tuple[Layout, ...]
    segment: int = -1


@dataclass(frozen=True)
class Collective:
    """Equal collectives that one device calls in a step, as predicted.

    `kind`: all_reduce, all_gather, reduce_scatter or all_to_all. `axis`: index of the mesh axis. `bytes`: the input of
    one call. `count`: calls per step. `seconds`: of all calls. `phase`: forward, backward or replay. `cause`: what the
    collective is for ("bucket 3": the bucket with index 3).
    """

    kind: str
    axis: int
    bytes: int
    count: int
    seconds: float
    phase: str
    cause: str


@dataclass(frozen=True)
class Moment:
    """A point of the step at which memory may peak: bytes per device by kind."""

    name: str
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one optimizer step on one device; `parts` are the bytes at the peak.

    `comm_seconds`: of all collectives, of which compute hides `hidden_seconds`.
    """

    step_seconds: float
    compute_seconds: float
    comm_seconds: float
    recompute_seconds: float
    optimizer_seconds: float
    peak_bytes: int
    parts: Mapping[str, int]
    moments: tuple[Moment, ...]
    flops: int  # model FLOPs of one step, all devices together, forward and backward
    hidden_seconds: float = 0.0


@dataclass(frozen=True)
class Alternative:
    """The best plan of a known scheme on the same cluster, to compare with.

    `predicted` (without moments) is its best plan within the budget. If none `fits`, it is its fastest plan without a
    budget, with the bounds of its `InfeasibleError`; None if the scheme has no plan at all, and `note` says why.
    """

    name: str
    fits: bool
    predicted: Prediction | None
    comm_bytes: int = 0  # handed to collectives by one device in a step
    smallest_budget_bytes: int | None = None
    note: str = ""
    budget_lower_bound_bytes: int | None = None


@dataclass(frozen=True)
class TradeoffPoint:
    """The best plan under another budget: bytes of one device, and seconds of a step."""

    budget_bytes: int
    peak_bytes: int
    step_seconds: float
    recompute_seconds: float


@dataclass(frozen=True)
class Span:
    """An uninterrupted run of work of one kind on a stream ("compute", or an axis' name) of the simulated step."""

    stream: str
    kind: str  # compute, recompute, communication or optimizer
    start_seconds: float
    seconds: float


GAP = 1e-3
"""Default relative gap at which the solver stops; a plan within it has the status "optimal"."""


@dataclass(frozen=True)
class Certificate:
    """What the solver proved: `objective` and `bound` in seconds, `gap` = (objective - bound) / objective.

    `bound` holds for plans whose equal blocks decide alike. A plan whose blocks decide separately may be faster than
    it; the bound is then the plan's own seconds.
    """

    status: str
    objective: float
    bound: float
    gap: float
    solver: str


@dataclass(frozen=True)
class PlanSize:
    """Size of the problem: graph nodes, decisions once equal blocks share theirs, variables and rows of the ILP."""

    ops: int
    decisions: int
    variables: int
    rows: int


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """A complete plan: what to run, its predicted cost, and the solver's certificate."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    cluster: Mapping[str, Any]
    fingerprints: Mapping[str, str]  # graph, model, mesh
    precision: Mapping[str, str | None]
    micro_batches: int
    optimizer: str
    inputs: str
    memory_budget_bytes: int | None
    constraints: tuple[str, ...]
    nodes: tuple[NodePlan, ...]
    parameters: tuple[ParameterPlan, ...]
    recompute: tuple[Segment, ...]
    collectives: tuple[Collective, ...]
    predicted: Prediction
    certificate: Certificate
    size: PlanSize
    planning_seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    comparison: tuple[Alternative, ...] = ()  # of `compare`
    tradeoff: tuple[TradeoffPoint, ...] = ()  # of `compare`, smallest budget first
    streams: tuple[Span, ...] = ()  # of `compare`
    buckets: tuple[Bucket, ...] = ()  # a parameter in no bucket is moved by collectives of its own
    compiled: bool = False  # priced as torch.compile fuses it
    batch_dims: tuple[int, ...] = ()  # with inputs="local": for each output, the dim of the batch's rows; -1: none
    version: int = field(default=VERSION)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; InputError where it cannot be written."""
        write_text("the plan", path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote; raises PlanMismatchError for another version or a damaged file, and InputError
        for one that is missing or no text."""
        try:
            text = path_of("a plan", path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"no plan can be read from {path}: {error}; `Plan.save` and `autopar plan --out` write such files"
            ) from error
        return Plan.from_json(text, source=str(path))

    def to_json(self) -> str:
        return json.dumps(json_form(self), indent=1)

    def essence(self) -> str:
        """JSON of what must agree between ranks: all but planning time, comparison, trade-off, streams and notes."""
        return replace(self, planning_seconds={}, comparison=(), tradeoff=(), streams=(), notes=()).to_json()

    @staticmethod
    def from_json(text: str, source: str = "plan") -> Plan:
        if not isinstance(text, str):
            raise InputError(f"a plan in JSON is text, not {type(text).__name__}: `Plan.to_json` makes such text")
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanMismatchError(f"{source} is not a plan: {error}") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version is None:
            raise PlanMismatchError(f"{source} is not a plan: a plan has a version; `Plan.to_json` makes one")
        if version != VERSION:
            raise PlanMismatchError(f"{source} has plan version {version!r}; this autopar reads {VERSION}: plan again")
        try:
            plan: Plan = revived(Plan, data)
        except (AttributeError, KeyError, LayoutError, TypeError, ValueError) as error:
            raise PlanMismatchError(f"{source} is a damaged plan ({error}): plan again") from error
        if message := damage(plan):
            raise PlanMismatchError(f"{source} is a damaged plan ({message}): take it as it was saved, or plan again")
        return plan

    @staticmethod
    def checked(plan: object) -> Plan:
        """Check that an argument is a Plan, and return it; InputError for anything else."""
        if not isinstance(plan, Plan):
            raise InputError(
                f"the plan is of {type(plan).__name__}: give a Plan, as `plan` makes it and `Plan.load` reads it"
            )
        return plan

    def served(self, collective: Collective) -> tuple[str, ...]:
        """The parameters that a collective of this plan gathers, or whose gradients it reduces."""
        kind, _, number = collective.cause.partition(" ")
        return self.buckets[int(number)].names if kind == "bucket" else ()
