"""The collectives of a plan, found by walking the graph in the runtime's order.

A tensor is converted to a wanted layout where that is first needed: once outside recomputed segments, and once inside
each segment that needs it. For activations this holds only in segments that are whole blocks; inner segments share
converted activations with everything outside. A replay runs a segment up to its last node that saves something.
Parameters move in buckets. Their gradients are reduced once a step; everything else moves once a micro-batch. Backward
gathers a parameter again once for all uses outside segments that save it, and each of these uses is charged for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.buckets.buckets import Conversion, Grouped, group
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.buckets.latency import BucketLatency
from autopar.cost.buckets.prices import BucketPrices, Priced
from autopar.cost.collectives import collective_seconds
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.overlap import Movable
from autopar.graph import COST, TensorRef, tensor_of
from autopar.layout import Layout
from autopar.plans import Bucket, Collective, ParameterPlan, Segment
from autopar.resharding.reshard import Move, steps

if TYPE_CHECKING:
    from autopar.cost.memory.planned_bytes import PlannedBytes
    from autopar.strategies.strategy import Strategy

Call = tuple[str, int, int, str, str]  # kind, axis, bytes, phase, cause


def conversion_moves(
    ref: TensorRef, source: Layout, wanted: Layout, mesh_shape: tuple[int, ...], *, needs_grad: bool
) -> tuple[list[Move], list[Move]]:
    """The collectives that convert `ref` from `source` to `wanted`, forward and backward; LayoutError if none do."""
    path = steps(source, wanted, tuple(tensor_of(ref).shape), mesh_shape, needs_grad=needs_grad)
    return [s.forward for s in path if s.forward], [s.backward for s in reversed(path) if s.backward]


def reduction_dtype(memory: StepMemory, ref: TensorRef) -> torch.dtype:
    """The dtype in which gradients of `ref` are sent."""
    own = tensor_of(ref).dtype
    return memory.precision.reduction or own if memory.is_parameter(ref.node) and own.is_floating_point else own


def needs_grad(memory: StepMemory, ref: TensorRef) -> bool:
    """Whether backward computes a gradient of `ref`."""
    return memory.train and tensor_of(ref).requires_grad


def gradient_enters(memory: StepMemory, node: fx.Node, ref: TensorRef) -> bool:
    """Whether backward within the graph computes a gradient of `node`'s input `ref`.

    Backward starts at the loss, the scalar among the outputs: no gradient enters through other outputs beside it.
    """
    if node.op != "output":
        return needs_grad(memory, ref)
    beside = any(not tensor_of(returned).dim() and needs_grad(memory, returned) for returned in memory.inputs[node])
    return needs_grad(memory, ref) and not (beside and tensor_of(ref).dim())


def in_segment(node: fx.Node) -> bool:
    """Whether a node within a segment's positions belongs to it; inputs, parameters and the output do not."""
    return node.op not in ("placeholder", "get_attr", "output")


def replay_end(memory: StepMemory, nodes: Sequence[fx.Node]) -> int:
    """How many of a segment's nodes a replay reaches: those up to the last one that saves something."""
    return max((i + 1 for i, node in enumerate(nodes) if in_segment(node) and memory.saves(node)), default=0)


def computed_end(memory: StepMemory, nodes: Sequence[fx.Node]) -> int:
    """How many of a segment's nodes a replay computes. The last one that saves something is not computed if it saves
    only inputs: autograd saves these before it computes, and `torch.utils.checkpoint` stops there."""
    end = replay_end(memory, nodes)
    return end - 1 if end and saves_inputs_alone(nodes[end - 1]) else end


def saves_inputs_alone(node: fx.Node) -> bool:
    """Whether autograd saves some inputs of a node and nothing else."""
    cost = node.meta.get(COST)
    return cost is not None and bool(cost.saved_inputs) and not (cost.saved_outputs or cost.saved_internal_bytes)


@dataclass(frozen=True)
class Transfer:
    """One collective and when it is due: before `node` runs in forward and replay, after its backward in backward.

    Those of a bucket (its number; -1: none) run in the background. A gather is due before the first node that reads it,
    in phase "again" before the backward of the last node that saved it; a "reduction" after that of the first reader.
    """

    node: fx.Node
    phase: str
    kind: str
    axis: int
    bytes: int
    seconds: float
    cause: str
    bucket: int = -1


@dataclass(frozen=True)
class Traffic:
    """What a plan sends in one step: its collectives, its buckets, and for each axis what could hide behind compute.
    `transfers`: every single collective of one micro-batch, the last one."""

    collectives: tuple[Collective, ...]
    buckets: tuple[Bucket, ...]
    movable: tuple[Movable, ...]
    transfers: tuple[Transfer, ...] = ()


def announced(
    memory: StepMemory,
    cluster: Cluster,
    chosen: Mapping[fx.Node, Strategy],
    parameters: Mapping[str, ParameterPlan],
    segments: Sequence[Segment],
    grouping: Grouping,
    plan: PlannedBytes | None = None,
) -> Traffic:
    """Every collective of one optimizer step on one device; equal ones are counted together.

    `plan`: the same plan, which knows equal blocks, so that their conversions are computed once.
    """
    return _Walk(memory, cluster, chosen, parameters, segments, grouping, plan).run()


class _Walk:
    """The walk over the graph. `conversions` collects those of parameters, which are grouped into buckets at the
    end."""

    def __init__(
        self,
        memory: StepMemory,
        cluster: Cluster,
        chosen: Mapping[fx.Node, Strategy],
        parameters: Mapping[str, ParameterPlan],
        segments: Sequence[Segment],
        grouping: Grouping,
        plan: PlannedBytes | None = None,
    ) -> None:
        self.memory, self.cluster, self.grouping, self.plan = memory, cluster, grouping, plan
        self.chosen, self.parameters = chosen, parameters
        self.nodes = list(memory.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.segments = segments
        self.segment_of: dict[fx.Node, int] = {}
        self.replayed: set[fx.Node] = set()  # nodes whose inputs a replay makes
        self.computed: set[fx.Node] = set()  # nodes whose outputs it makes too
        for number, segment in enumerate(segments):
            inside = self.nodes[segment.first : segment.last + 1]
            self.segment_of.update((node, number) for node in inside if in_segment(node))
            self.replayed.update(node for node in inside[: replay_end(memory, inside)] if in_segment(node))
            self.computed.update(node for node in inside[: computed_end(memory, inside)] if in_segment(node))
        self.count: Counter[Call] = Counter()
        self.seconds: defaultdict[Call, float] = defaultdict(float)
        self.conversions: dict[tuple[TensorRef, Layout, int | None], Conversion] = {}
        self.paid: set[tuple[TensorRef, Layout, int | None]] = set()
        self.movable = tuple(Movable(len(grouping.stretches)) for _ in cluster.axes)
        self.last: dict[tuple[TensorRef, Layout], fx.Node] = {}  # the last node outside segments that saves a parameter
        self.transfers: list[Transfer] = []
        self._told: dict[tuple[object, ...], tuple[list[Move], list[Move]]] = {}

    def run(self) -> Traffic:
        for node in self.plan.nodes_with_transfers() if self.plan else [n for n in self.nodes if n in self.chosen]:
            self._inputs(node)
            self._inner(node)
        conversions = list(self.conversions.values())
        refs = [conversion.ref for conversion in conversions]
        dtypes = {ref.node: reduction_dtype(self.memory, ref) for ref in refs}
        buckets = group(conversions, self.grouping, self.memory, dtypes)
        latency = BucketLatency(conversions, self.grouping, self.memory.mesh_shape)
        prices = BucketPrices(self.cluster, self.grouping, dtypes, self.plan, latency)
        for number, bucket in enumerate(buckets):
            self._bucket(number, bucket, prices)
        collectives = tuple(
            Collective(kind, axis, size, count, self.seconds[kind, axis, size, phase, cause], phase, cause)
            for (kind, axis, size, phase, cause), count in self.count.items()
            if self.cluster.axes[axis].size > 1
        )
        planned = tuple(bucket.planned() for bucket in buckets)
        return Traffic(collectives, planned, self.movable, tuple(self.transfers))

    def _inputs(self, node: fx.Node) -> None:
        """Add the conversions of a node's inputs."""
        memory = self.memory
        saved_inputs, segment = memory.saved(node)[0], self.segment_of.get(node)
        for i, (ref, wanted) in enumerate(zip(memory.inputs[node], self.chosen[node].inputs, strict=True)):
            parameter = self.parameters.get(str(ref.node.target)) if memory.is_parameter(ref.node) else None
            source = parameter.storage if parameter else self.chosen[ref.node].outputs[ref.index]
            grad = needs_grad(memory, ref)
            source, wanted = (source, wanted) if grad else (source.value(), wanted.value())
            enters = gradient_enters(memory, node, ref)
            if parameter is None:
                inner = segment is not None and self.segments[segment].inner
                scope = None if inner else segment
                if (ref, wanted, scope) not in self.paid:
                    self.paid.add((ref, wanted, scope))
                    again = node in self.replayed and (not inner or self.segment_of.get(ref.node) == segment)
                    self._activation(node, ref, source, wanted, grad=grad, enters=enters, again=again)
                continue
            conversion = self.conversions.get((ref, wanted, segment))
            if conversion is None:
                moves = self._moves(ref, source, wanted, grad)
                number = -1 if segment is None else segment
                conversion = Conversion(ref, wanted, number, node, *moves, regather=parameter.regather)
                self.conversions[ref, wanted, segment] = conversion
            conversion.enters |= enters
            conversion.replayed |= node in self.replayed
            conversion.saved += i in saved_inputs
            if i in saved_inputs and segment is None:
                conversion.kept += 1
                self.last[ref, wanted] = node

    def _moves(self, parameter: TensorRef, source: Layout, wanted: Layout, grad: bool) -> tuple[list[Move], list[Move]]:
        """The collectives of a parameter; computed once for the parameters of equal blocks."""
        key = self.plan.stands_for(parameter.node) if self.plan else parameter.node, source, wanted, grad
        if key not in self._told:
            shape = self.memory.mesh_shape
            self._told[key] = conversion_moves(parameter, source, wanted, shape, needs_grad=grad)
        return self._told[key]

    def _activation(
        self, node: fx.Node, ref: TensorRef, source: Layout, wanted: Layout, *, grad: bool, enters: bool, again: bool
    ) -> None:
        """Add the collectives of an activation's conversion: once a micro-batch, and `again` in a replay."""
        times, size = self.memory.micro_batches, tensor_of(ref).dtype.itemsize
        forward, backward = conversion_moves(ref, source, wanted, self.memory.mesh_shape, needs_grad=grad)
        for move in forward:
            self._call(node, move.kind, move.axis, move.elements * size, "forward", "activations", times)
            if again:
                self._call(node, move.kind, move.axis, move.elements * size, "replay", "activations", times)
        for move in backward if enters else ():
            self._call(node, move.kind, move.axis, move.elements * size, "backward", "activations", times)

    def _inner(self, node: fx.Node) -> None:
        times = self.memory.micro_batches
        for inner in self.chosen[node].inner:
            if inner.forward_bytes:
                self._call(node, inner.kind, inner.axis, inner.forward_bytes, "forward", "ops", times)
                if node in self.computed:
                    self._call(node, inner.kind, inner.axis, inner.forward_bytes, "replay", "ops", times)
            if inner.backward_bytes and self.memory.train:
                self._call(node, inner.kind, inner.axis, inner.backward_bytes, "backward", "ops", times)

    def _call(self, node: fx.Node, kind: str, axis: int, size: int, phase: str, cause: str, count: int) -> None:
        self.count[kind, axis, size, phase, cause] += count
        seconds = collective_seconds(kind, size, self.cluster.axes[axis])
        self.seconds[kind, axis, size, phase, cause] += count * seconds
        self.transfers.append(Transfer(node, phase, kind, axis, size, seconds, cause))

    def _bucket(self, number: int, bucket: Grouped, prices: BucketPrices) -> None:
        """Add a bucket's collectives: its gathers run in every micro-batch, its reductions once a step."""
        times, members = self.memory.micro_batches, bucket.members
        gathers = prices.of(members, "gathers")
        self._together(number, members, [1] * len(members), gathers, "forward", times, "gathers")
        if any(member.replayed for member in members):
            replays = prices.of(members, "again")
            self._together(number, members, [member.replayed for member in members], replays, "replay", times, "again")
        again = bucket.again
        kept = prices.of(again, "again")
        self._together(number, again, [member.kept for member in again], kept, "backward", times, "again")
        if members[0].enters:
            reductions = prices.of(members, "reductions")
            self._together(number, members, [1] * len(members), reductions, "backward", 1, "reductions")

    def _together(
        self,
        number: int,
        members: Sequence[Conversion],
        uses: Sequence[int],
        moves: Sequence[Priced],
        phase: str,
        count: int,
        kind: Literal["gathers", "again", "reductions"],
    ) -> None:
        """Add one phase of a bucket's collectives; `uses`: how often the solver charges each member for them."""
        due = {"gathers": "forward", "reductions": "reduction"}.get(kind, "again" if phase == "backward" else phase)
        readers = [self.last[member.ref, member.wanted] if due == "again" else member.first for member in members]
        for move in moves:
            key = move.kind, move.axis, move.bytes, phase, f"bucket {number}"
            movable = getattr(self.movable[move.axis], kind)
            self.count[key] += count
            together = 0.0
            for (seconds, stretch), times in zip(move.members, uses, strict=True):
                self.seconds[key] += count * times * seconds
                together += times * seconds
                movable[stretch] += count * times * seconds
            at = max(readers, key=self.position.__getitem__) if due == "again" else readers[0]
            self.transfers.append(Transfer(at, due, *key[:3], together, key[4], number))
