"""The points of a step where the peak can be, and what lives at each beside what is kept: from the graph alone.

A point is one op's forward or backward, at its fullest: its results are there, and nothing that it read is freed.

Forward: values that somebody reads later and nobody keeps so far. Backward runs the ops in reverse; the gradient of a
tensor lives from the backward of its last reader, where readers' gradients are added up, to that of its maker. Some
gradients are other gradients: those of views, and both of an addition's (`NodeCost.gradient_alias_of`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory import Copy, StepMemory
from autopar.cost.traffic import conversion_moves, gradient_enters, in_segment, needs_grad
from autopar.graph import COST, TensorRef, is_getitem, output_tensors
from autopar.layout import Layout

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy


@dataclass(frozen=True)
class Point:
    """An op's forward or backward.

    `passing`: tensors of which values (or gradients) live, each as its maker lays it out; in backward, gradients of the
    op's outputs are among them. `made`: inputs whose gradients the op makes as tensors of their own, one entry for each
    such tensor (a sum with what other readers gave may be one more).
    """

    node: fx.Node
    backward: bool
    passing: tuple[TensorRef, ...]
    made: tuple[int, ...] = ()


class Lifetimes:
    """The points of all ops, by node."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self._nodes = list(memory.graph.nodes)
        self.position = {node: i for i, node in enumerate(self._nodes)}
        self._last_read: dict[TensorRef, int] = {}  # storages, by ops
        self._forward = self._forward_points()
        self._backward = self._backward_points() if memory.train else {}
        self.last_use = self._last_uses()
        self._last_reader = max((self.position[n] for n in self.last_use.values()), default=len(self._nodes))

    def points(self, node: fx.Node) -> tuple[Point, ...]:
        """Those of one op: none of a view, and of what is only read or handed over."""
        cost = node.meta.get(COST)
        if not in_segment(node) or is_getitem(node) or cost is None:
            return ()
        found = (self._forward.get(node), self._backward.get(node))
        return tuple(point for point in found if point is not None)

    def after_parameters(self, node: fx.Node) -> bool:
        """Whether an op stands behind all that read parameters: it makes the loss of what the model computes."""
        return self.position[node] > self._last_reader

    def stays_within(self, root: TensorRef, first: int, last: int) -> bool:
        """Whether a storage is made and read by nodes at positions from `first` to `last` alone."""
        inside = first <= self.position[root.node] and self._last_read.get(root, first) <= last
        return inside and in_segment(root.node) and root not in self._returned

    def own_bytes(self, point: Point, strategy: Strategy) -> int:
        """What the op itself has alive at a point for a moment."""
        memory, cost = self.memory, point.node.meta[COST]
        inputs = memory.inputs[point.node]
        if point.backward:
            made = sum(memory.local_bytes(inputs[j], strategy.inputs[j]) for j in point.made)
            return made + round(cost.workspace_backward_bytes * strategy.work)
        unsaved: dict[Copy, int] = {}
        at = self.position[point.node]
        layouts = [*zip(inputs, strategy.inputs, strict=True)]
        layouts += [(TensorRef(point.node, i), layout) for i, layout in enumerate(strategy.outputs)]
        for ref, layout in layouts:
            root = memory.roots.get(ref, ref)
            if self._first_saver.get(root, len(self._nodes)) > at and not memory.is_parameter(root.node):
                copy = memory.copy(ref, layout)
                unsaved[copy] = memory.copy_bytes(copy)
        return sum(unsaved.values()) + round(cost.workspace_forward_bytes * strategy.work)

    def conversion_bytes(self, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
        """An input as its maker has it, beside the same as the op wants it, where collectives make one of the other."""
        memory = self.memory
        if source == wanted:
            return 0
        grad = needs_grad(memory, ref)
        if point.backward and not grad:
            return 0
        source, wanted = (source, wanted) if grad else (source.value(), wanted.value())
        forward, backward = conversion_moves(ref, source, wanted, memory.mesh_shape, needs_grad=grad)
        moves = [move for move in (backward if point.backward else forward) if memory.mesh_shape[move.axis] > 1]
        return memory.local_bytes(ref, source) if moves else 0

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward_points(self) -> dict[fx.Node, Point]:
        memory = self.memory
        self._first_saver: dict[TensorRef, int] = {}
        last = self._last_read
        for i, node in enumerate(self._nodes):
            inputs, outputs, _ = memory.saved(node)
            refs = memory.inputs[node]
            for ref in [refs[j] for j in inputs] + [TensorRef(node, j) for j in outputs]:
                self._first_saver.setdefault(memory.roots.get(ref, ref), i)
            if in_segment(node) and not is_getitem(node):
                last.update((memory.roots.get(ref, ref), i) for ref in refs)
        returned = (ref for node in self._nodes if node.op == "output" for ref in memory.inputs[node])
        self._returned = {memory.roots.get(ref, ref) for ref in returned}
        found: dict[fx.Node, Point] = {}
        live: dict[TensorRef, None] = {}
        for i, node in enumerate(self._nodes):
            if not in_segment(node) or is_getitem(node):
                continue
            live = {r: None for r in live if last[r] >= i and self._first_saver.get(r, len(self._nodes)) > i}
            own = {memory.roots.get(ref, ref) for ref in memory.inputs[node]}
            if not self._is_view(node):
                found[node] = Point(node, False, tuple(r for r in live if r not in own))
            for index in range(len(output_tensors(node))):
                root = memory.roots.get(TensorRef(node, index), TensorRef(node, index))
                if root.node is node and last.get(root, i) > i:
                    live[root] = None
        return found

    def _is_view(self, node: fx.Node) -> bool:
        cost = node.meta.get(COST)
        return cost is None or (bool(cost.alias_of) and None not in cost.alias_of)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_points(self) -> dict[fx.Node, Point]:
        memory = self.memory
        found: dict[fx.Node, Point] = {}
        storage: dict[TensorRef, TensorRef] = {}  # of a tensor's gradient so far, named by the tensor it was made for
        for node in reversed(self._nodes):
            refs = memory.inputs[node]
            if node.op == "output":
                storage.update((ref, ref) for ref in refs if gradient_enters(memory, node, ref))
                continue
            mine = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
            if not in_segment(node) or not any(ref in storage for ref in mine):
                continue
            alias = node.meta[COST].gradient_alias_of if COST in node.meta else ()
            made: list[int] = []
            given: list[tuple[TensorRef, TensorRef, int]] = []
            for j, ref in enumerate(refs):
                if not needs_grad(memory, ref):
                    continue
                source = alias[j] if j < len(alias) else None
                shared = storage.get(TensorRef(node, source)) if source is not None else None
                if shared is None and (not memory.is_parameter(ref.node) or self._used_after(ref.node, node)):
                    made.append(j)
                if not memory.is_parameter(ref.node):
                    given.append((ref, shared or ref, j))
            passing = tuple(dict.fromkeys(storage.values()))
            for one in mine:
                storage.pop(one, None)
            holders = Counter(storage.values())
            holders.update(kept for _, kept, _ in given)
            for ref, new, j in given:
                old = storage.get(ref)
                if old is not None and holders[old] > 1:  # autograd adds in place only what nobody else holds
                    made.append(j)
                    new = ref
                storage[ref] = new if old is None or holders[old] > 1 else old
            if made or self._works_backward(node):
                found[node] = Point(node, True, passing, tuple(made))
        return found

    def _works_backward(self, node: fx.Node) -> bool:
        cost = node.meta.get(COST)
        return cost is not None and bool(cost.moved_bytes_backward or cost.workspace_backward_bytes)

    def _used_after(self, parameter: fx.Node, node: fx.Node) -> bool:
        """Whether backward has a gradient of the parameter already when it comes to this reader."""
        return any(self.position[user] > self.position[node] for user in parameter.users if in_segment(user))

    def _last_uses(self) -> dict[fx.Node, fx.Node]:
        """The last reader of each parameter, where its first gradient comes from."""
        found: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for ref in self.memory.inputs[node]:
                if self.memory.is_parameter(ref.node):
                    found[ref.node] = node
        return found
