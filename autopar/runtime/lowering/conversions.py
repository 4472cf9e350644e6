"""Values of the trace in the layouts that ops want: converted where first needed, parameters by buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import PlanMismatchError
from autopar.graph import TensorRef, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.plans import Bucket as PlannedBucket
from autopar.plans import NodePlan, Plan
from autopar.runtime.communication.buckets import Bucket, copies, moves
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.convert import Recipe, convert, recipe
from autopar.runtime.communication.route import Stop
from autopar.runtime.gradients.gradient_sums import Summed
from autopar.runtime.lowering.scopes import Scope, readers


class Conversions:
    """Inserts conversions into scopes. `places`, the parameters' positions in the state, are known once all inputs are.

    `stored`: dtypes of parameters and buffers; `stops`: the buckets so far, in graph order. In a graph of a call
    without gradients nothing is reduced in backward, as in its plan; so parameters whose layouts differ only for
    gradients can share a bucket.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], plan: Plan, mesh: LocalMesh, stored: Mapping[str, torch.dtype]
    ) -> None:
        self.plans = _plans_by_node(nodes, plan)
        self.places: dict[str, int] = {}
        self.stops: list[Stop] = []
        self._mesh, self._stored = mesh, stored
        self._has_backward = torch.is_grad_enabled()
        self._casts_inputs = plan.precision.get("compute") is not None
        self._attributes = {str(node.target): node for node in nodes if node.op == "get_attr"}
        self._parameters = {p.name: p for p in plan.parameters}
        self._reduction_dtype = dtype_named(plan.precision.get("reduction"))
        self._buckets = _buckets(plan)

    def value(self, ref: TensorRef, layout: Layout, scope: Scope, position: int) -> fx.Node:
        """Tensor `ref` in `layout`, for the node at `position`; it is converted at its first use in this scope."""
        layout = self.effective(ref, layout)
        if (ref, layout) not in scope.converted:
            if scope.parent is not None and scope.takes_converted(ref):
                scope.converted[ref, layout] = scope.further_input(self.value(ref, layout, scope.parent, position))
                return scope.converted[ref, layout]
            steps = self._recipe(ref, layout)
            if self._is_parameter(ref) and moves(steps):
                self._bucket(ref, layout, scope, position)
            elif ref.node.op == "get_attr" and self._is_made_again(str(ref.node.target), scope) and copies(steps):
                self._insert_bucket([(ref, layout)], [steps], scope, position)
            else:
                local = scope.value(ref)
                if not steps.is_identity:
                    local = scope.graph.call_function(convert, (local, scope.attribute("recipe", steps)))
                scope.converted[ref, layout] = local
        return scope.converted[ref, layout]

    def read(self, ref: TensorRef, layout: Layout, scope: Scope, position: int) -> fx.Node:
        """The value as an op reads it: a parameter with several readers comes through a node that sums gradients."""
        value = self.value(ref, layout, scope, position)
        if not (self._is_parameter(ref) and self._needs_grad(ref) and len(readers(ref)) > 1):
            return value
        steps, stage = self._recipe(ref, self.effective(ref, layout)), None
        if not steps.is_identity:
            if not moves(steps):
                return value
            stage = steps.stages[0]
        summed = Summed(self.places[str(ref.node.target)], stage)
        return scope.graph.call_function(summed, (scope.transit(), value))

    def moves(self, node: fx.Node) -> bool:
        """Whether a node reads a parameter whose conversion needs collectives."""
        pairs = zip(tensor_inputs(node), self.plans[node].inputs, strict=True) if node in self.plans else ()
        return any(self._is_parameter(ref) and moves(self._recipe(ref, self.effective(ref, w))) for ref, w in pairs)

    def _is_parameter(self, ref: TensorRef) -> bool:
        """Whether a tensor is a parameter of the plan, whose gradient the transit brings."""
        return ref.node.op == "get_attr" and str(ref.node.target) in self._parameters

    def effective(self, ref: TensorRef, layout: Layout) -> Layout:
        """The layout without its gradient part, for a tensor that gets no gradient; else as it is."""
        return layout if self._needs_grad(ref) else layout.value()

    def _needs_grad(self, ref: TensorRef) -> bool:
        return self._has_backward and tensor_of(ref).requires_grad

    def plan_of(self, node: fx.Node) -> NodePlan:
        if node not in self.plans:
            raise PlanMismatchError(f"the plan says nothing about node '{node.name}' of the graph: plan again")
        return self.plans[node]

    def _recipe(self, ref: TensorRef, layout: Layout) -> Recipe:
        data, name = tensor_of(ref), str(ref.node.target) if ref.node.op == "get_attr" else None
        return recipe(
            self._layout(ref),
            layout,
            tuple(data.shape),
            self._mesh,
            needs_grad=self._needs_grad(ref),
            dtype=data.dtype if self._is_cast(ref) else None,
            reduction_dtype=self._reduction_dtype if name else None,
        )

    def _is_cast(self, ref: TensorRef) -> bool:
        """Whether a tensor may have another dtype at run time than the one in which ops read it."""
        data = tensor_of(ref)
        if ref.node.op == "placeholder":  # a call may pass any dtype
            return self._casts_inputs and data.is_floating_point()
        return ref.node.op == "get_attr" and self._stored.get(str(ref.node.target), data.dtype) != data.dtype

    def _bucket(self, ref: TensorRef, layout: Layout, scope: Scope, position: int) -> None:
        """Convert all members of the bucket that contains this tensor, at their first use in this scope."""
        name = str(ref.node.target)
        planned = self._buckets.get((name, layout, scope.segment)) if ref.node is self._attributes.get(name) else None
        members = [(ref, layout)]
        if planned is not None:
            if not self._attributes.keys() >= set(planned.names):
                raise PlanMismatchError(
                    f"the plan has '{name}' in a bucket with parameters of another graph: plan again"
                )
            members = [
                (TensorRef(self._attributes[n], 0), w) for n, w in zip(planned.names, planned.wanted, strict=True)
            ]
        recipes = [self._recipe(*member) for member in members]
        if not all(map(moves, recipes)):
            raise PlanMismatchError(f"the plan has '{name}' in a bucket with parameters that do not move: plan again")
        self._insert_bucket(members, recipes, scope, position)

    def _insert_bucket(
        self, members: Sequence[tuple[TensorRef, Layout]], recipes: Sequence[Recipe], scope: Scope, position: int
    ) -> None:
        """Insert one bucket into a scope, and record its members as converted there."""
        names = tuple(str(member.node.target) for member, _ in members)
        bucket = Bucket(
            tuple(self.places[n] for n in names),
            names,
            tuple(recipe.stages[0] for recipe in recipes),
            regathers=any(self._is_made_again(n, scope) for n in names),
            in_segment=scope.parent is not None,
        )
        bucket.check()
        shards = [scope.value(member) for member, _ in members]
        converted = scope.graph.call_function(bucket, (scope.transit(), *shards))
        for number, member in enumerate(members):
            scope.converted[member] = scope.pick(converted, (pytree.SequenceKey(number),))
        self.stops.append(Stop(bucket, scope.segment, position <= scope.replayed))

    def _is_made_again(self, name: str, scope: Scope) -> bool:
        """Whether a parameter's copy is freed after its use in forward; in segments a replay makes it again anyway."""
        return scope.parent is None and name in self._parameters and self._parameters[name].regather

    def _layout(self, ref: TensorRef) -> Layout:
        """The layout in which `ref` is produced, or stored."""
        if ref.node.op == "get_attr":
            parameter = self._parameters.get(str(ref.node.target))
            return parameter.storage if parameter else Layout.replicated(len(self._mesh.shape))
        return self.effective(ref, self.plan_of(ref.node).outputs[ref.index])


def dtype_named(name: str | None) -> torch.dtype | None:
    """
    >>> dtype_named("torch.float32"), dtype_named("bfloat16"), dtype_named(None)
    (torch.float32, torch.bfloat16, None)
    """
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _buckets(plan: Plan) -> dict[tuple[str, Layout, int], PlannedBucket]:
    """The plan's buckets by their members: (name, wanted layout, segment)."""
    return {
        (name, layout, bucket.segment): bucket
        for bucket in plan.buckets
        for name, layout in zip(bucket.names, bucket.wanted, strict=True)
    }


def _plans_by_node(nodes: Sequence[fx.Node], plan: Plan) -> dict[fx.Node, NodePlan]:
    if any(p.position >= len(nodes) for p in plan.nodes):
        raise PlanMismatchError(f"the plan names a node past the {len(nodes)} of this graph: plan again")
    return {nodes[p.position]: p for p in plan.nodes}
