"""Lowering: a traced graph and its plan become a graph that one rank runs on its local tensors.

Every node keeps its torch function. Between two nodes whose layouts differ stands `convert(value, recipe)`; it is
inserted where the wanted layout is first needed, and shared by all readers that want the same layout.

A recomputed segment becomes a submodule under `torch.utils.checkpoint`. Its inputs are the tensors from outside in the
layouts that they have there, parameter shards included; so their conversions are inside the segment, and a replay
gathers again. An inner segment takes activations in the layouts that its nodes want, and returns what it has converted,
so that each tensor is converted once.

Parameters are converted by buckets: those of the plan, and a bucket of its own for each parameter that is in none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from autopar.errors import PlanMismatchError
from autopar.graph import VAL, TensorRef, is_getitem, output_tensors, resolve, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.route import Route
from autopar.runtime.local.norms import write_statistics
from autopar.runtime.lowering.conversions import Conversions
from autopar.runtime.lowering.emission import Modes, constant, emit, reads_memory
from autopar.runtime.lowering.refusion import find_fusions
from autopar.runtime.lowering.scopes import Scope, keeps_statistics, readers, written_buffers
from autopar.runtime.stored.first_writes import FirstWrites


@dataclass(frozen=True)
class Lowered:
    """A graph for local tensors, and what to call it with.

    `module(*values of placeholders, *local tensors of `state`, transit, [random key])` returns the flat outputs as
    local tensors and constants; `outputs` are their layouts, global shapes and strides, None for what is no tensor.
    `writes`: what a call writes into tensors of `state` before it runs `module`.
    """

    module: fx.GraphModule
    state: tuple[str, ...]
    takes_key: bool
    outputs: tuple[tuple[Layout, tuple[int, ...], tuple[int, ...]] | None, ...]
    route: Route
    writes: FirstWrites


@dataclass(frozen=True)
class Rank:
    """The rank that a graph is lowered for: its view of the mesh, its device, dtypes of its parameters and buffers."""

    mesh: LocalMesh
    device: torch.device
    stored: Mapping[str, torch.dtype]


def lower(graph: fx.Graph, plan: Plan, rank: Rank) -> Lowered:
    """The local form of `graph` under `plan`; raises PlanMismatchError if the plan does not fit the graph."""
    return _Lowering(graph, plan, rank).run()


class _Lowering:
    def __init__(self, graph: fx.Graph, plan: Plan, rank: Rank) -> None:
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.rank = rank
        self.conversions = Conversions(self.nodes, plan, rank.mesh, rank.stored)
        self.plans = self.conversions.plans
        self.written = {ref for node in self.nodes for ref in written_buffers(node)}
        self.segment_of = _segments_by_node(self.nodes, plan)
        beyond_replay = {
            node
            for s in plan.recompute
            if s.replayed >= 0
            for node in self.nodes[s.replayed + 1 : s.last + 1]
            if self.conversions.moves(node)
        }
        self.fused = find_fusions(self.nodes, self.plans, self.segment_of, beyond_replay)
        self.absorbed = {fused.product for fused in self.fused.values()}
        self.modes = Modes(self.nodes)
        self.outer = Scope(fx.Graph())
        self.segments = plan.recompute
        self.state_nodes = [node for node in self.nodes if node.op == "get_attr" and output_tensors(node)]
        self.state = [str(node.target) for node in self.state_nodes]
        self.outputs: list[tuple[Layout, tuple[int, ...], tuple[int, ...]] | None] = []

    def run(self) -> Lowered:
        self._inputs()
        for segment, members in groupby(self.nodes, key=self.segment_of.get):
            if segment is None:
                for node in members:
                    self._place(node, self.outer)
            else:
                self._segment(segment, list(members))
        return Lowered(
            self.outer.module(),
            tuple(self.state),
            self.outer.has_random_key,
            tuple(self.outputs),
            Route.of(self.conversions.stops, self.state),
            FirstWrites.of(self.state_nodes),
        )

    def _inputs(self) -> None:
        """Insert the graph's inputs: the trace's placeholders, then local tensors of parameters and buffers."""
        for node in self.nodes:
            if node.op == "placeholder":
                local = self.outer.placeholder(node.name)
                self.outer.values.update((ref, self.outer.pick(local, path)) for ref, path in _paths(node))
        for node, name in zip(self.state_nodes, self.state, strict=True):
            self.outer.values[TensorRef(node, 0)] = self.outer.placeholder("state_" + name.replace(".", "_"))
        self.conversions.places.update((name, place) for place, name in enumerate(self.state))
        self.outer.transit()

    # -- one node, and the values it wants ---------------------------------------------------------

    def _place(self, node: fx.Node, scope: Scope) -> None:
        """Insert one node of the trace, after the conversions that it needs."""
        self.at = self.position[node]
        if node.op == "output":
            self._output(node)
            return
        if node.op in ("placeholder", "get_attr") or is_getitem(node) or node in self.absorbed:
            return
        if not output_tensors(node):
            return  # integers are constants of the plan's shapes
        plan, fused = self.conversions.plan_of(node), self.fused.get(node)
        arguments, inputs = (fused.arguments, fused.inputs) if fused else ((node.args, node.kwargs), plan.inputs)
        as_traced = fused is None and reads_memory(node.target)
        args, kwargs = self._arguments(arguments, inputs, scope, as_traced)
        autocast = self.modes.enter(node, scope.graph)
        if fused is not None:
            new = scope.graph.call_function(fused.target, args, kwargs)
        else:
            new = emit(node, plan, args, kwargs, scope, self.rank.mesh)
        self.modes.leave(node, scope.graph, autocast)
        scope.values.update((ref, scope.pick(new, path)) for ref, path in _paths(node) if readers(ref))

    def _arguments(self, arguments: Any, inputs: tuple[Layout, ...], scope: Scope, as_traced: bool = False) -> Any:
        """Arguments with every tensor in its wanted layout and every integer a constant; `as_traced`: tensors that are
        contiguous in the trace are made so here."""
        wanted = list(inputs)

        def value(ref: TensorRef) -> fx.Node:
            read = self.conversions.read(ref, wanted.pop(0), scope, self.at)
            again = as_traced and tensor_of(ref).is_contiguous()
            return scope.graph.call_method("contiguous", (read,)) if again else read

        def argument(source: fx.Node) -> Any:
            whole, refs = source.meta.get(VAL), resolve(source)
            if len(refs) > len(wanted):
                raise PlanMismatchError(f"the plan has too few layouts for what reads '{source.name}': plan again")
            values = iter([value(ref) for ref in refs])
            if isinstance(whole, torch.Tensor):
                return next(values)
            return pytree.tree_map(lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf, whole)

        return constant(fx.node.map_arg(arguments, argument), self.rank.device, scope.object_attribute)

    # -- segments and outputs ----------------------------------------------------------------------

    def _segment(self, number: int, members: list[fx.Node]) -> None:
        """Insert the nodes of a recomputed segment: a submodule, called under `checkpoint`."""
        updated = {ref for node in members for ref in written_buffers(node)}
        inside = Scope(fx.Graph(), parent=self.outer, copied=self.written, updated=updated)
        planned = self.segments[number]
        inside.segment, inside.replayed, inside.inner = number, planned.replayed, planned.inner
        for node in members:
            self._place(node, inside)
        own = {node for node in members if node.op not in ("placeholder", "get_attr")}
        results = [ref for ref in inside.values if ref.node in own and not readers(ref) <= set(members)]
        shared = [pair for pair in inside.converted if planned.inner and self._shares(pair, own, members, inside)]
        written = [new for _, new in inside.updates.values()]
        returned = [*(inside.values[ref] for ref in results), *(inside.converted[pair] for pair in shared), *written]
        inside.graph.output(tuple(returned))
        call = self.outer.graph.call_function(
            recomputed, (self.outer.attribute("segment", inside.module()), *inside.outer_inputs)
        )
        outcomes = [self.outer.pick(call, (pytree.SequenceKey(i),)) for i in range(len(returned))]
        self.outer.values.update(zip(results, outcomes, strict=False))
        self.outer.converted.update(zip(shared, outcomes[len(results) :], strict=False))
        for ref, new in zip(inside.updates, outcomes[len(results) + len(shared) :], strict=True):
            buffer, _ = inside.updates[ref]
            if all(keeps_statistics(node) for node in members if ref in written_buffers(node)):
                self.outer.graph.call_function(write_statistics, (buffer, new))
            else:
                self.outer.graph.call_method("copy_", (buffer, new))

    def _shares(
        self, pair: tuple[TensorRef, Layout], own: set[fx.Node], members: Collection[fx.Node], inside: Scope
    ) -> bool:
        """Whether a tensor that an inner segment has made and converted is wanted in that layout outside too."""
        ref, layout = pair
        if ref.node not in own or inside.converted[pair] is inside.values[ref]:
            return False
        outside = [node for node in readers(ref) if node not in members and node in self.plans]
        wants = (zip(tensor_inputs(node), self.plans[node].inputs, strict=True) for node in outside)
        return any(
            read_ref == ref and self.conversions.effective(ref, w) == layout for pairs in wants for read_ref, w in pairs
        )

    def _output(self, node: fx.Node) -> None:
        leaves = node.args[0]
        assert isinstance(leaves, (tuple, list))
        tensors = [resolve(leaf) if isinstance(leaf, fx.Node) else [] for leaf in leaves]
        inputs = self.plans[node].inputs if any(tensors) else ()
        wanted = iter(inputs)
        for refs in tensors:
            layout = next(wanted) if refs else None
            value = tensor_of(refs[0]) if refs else None
            self.outputs.append((layout, tuple(value.shape), value.stride()) if layout and value is not None else None)
            if layout is not None and not layout.is_plain(self.rank.mesh.shape):
                raise PlanMismatchError(
                    f"an output has layout {layout}; outputs must be whole or plain shards: plan again"
                )
        self.outer.graph.output(self._arguments(tuple(leaves), inputs, self.outer))


def recomputed(segment: fx.GraphModule, *inputs: Any) -> Any:
    """Run a segment, and once more in backward."""
    # Not by __call__: that of a GraphModule parses the traceback whenever a replay ends early.
    return checkpoint(segment.forward, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _segments_by_node(nodes: list[fx.Node], plan: Plan) -> dict[fx.Node, int]:
    """The number of the recomputed segment of each node that is in one."""
    return {node: i for i, segment in enumerate(plan.recompute) for node in nodes[segment.first : segment.last + 1]}


def _paths(node: fx.Node) -> list[tuple[TensorRef, pytree.KeyPath]]:
    """The tensors that a node yields, each with its pytree path in the node's value."""
    leaves = pytree.tree_leaves_with_path(node.meta[VAL])
    paths = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [(TensorRef(node, index), path) for index, path in enumerate(paths)]
