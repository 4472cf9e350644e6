"""The points of a step that can be the peak, and what lives at each beside saved tensors: from the graph alone.

A point is one op's forward or backward when it has most: its results are there, and nothing that it read is freed yet.
In forward, there live values that a later op reads and that no op so far has saved. Backward runs the ops in reverse;
which gradients live is told in `cost.memory.gradient_storages`.

Of equal blocks (`cost.structure.folds`), the walks in both directions visit only the first four and the last, as if the
last came after the fourth. If the same lives, shifted by a block, when a walk enters the model block and when it enters
the next, then the blocks between are equal to these two, and their points are the model's, shifted. Otherwise the walks
are repeated over all blocks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.gradient_storages import GradientStorages
from autopar.cost.memory.point import Point
from autopar.cost.structure.folds import MODEL, Fold
from autopar.cost.traffic import gradient_enters, in_segment, needs_grad
from autopar.graph import COST, TensorRef, is_getitem, output_tensors

if TYPE_CHECKING:
    from autopar.cost.memory.transfer_bytes import TransferBytes
    from autopar.strategies.strategy import Strategy


class Lifetimes:
    """The points of all ops, by node."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self._all = list(memory.graph.nodes)
        self.position = {node: i for i, node in enumerate(self._all)}
        self._folds: list[Fold] = list(memory.folds)
        while not self._pass():
            pass
        self._last_reader = max(
            (self.position[n] for n in self._nodes if any(memory.is_parameter(r.node) for r in memory.inputs[n])),
            default=len(self._all),
        )

    def _pass(self) -> bool:
        """Walk in both directions; False if blocks were left out that turn out to differ."""
        unseen = {position for fold in self._folds for position in fold.unseen}
        self._nodes = [node for i, node in enumerate(self._all) if i not in unseen]
        self._stands: dict[fx.Node, fx.Node] = {}  # for nodes before a last block: their like in the fourth block
        self._starts: dict[fx.Node, tuple[Fold, int]] = {}  # by first node: blocks at which the same must live
        self._ends: dict[fx.Node, tuple[Fold, int]] = {}
        for fold in self._folds:
            repeat = fold.repeat
            pairs = zip(repeat.instance(repeat.count - 2), repeat.instance(MODEL + 1), strict=True)
            self._stands.update((self._all[before_last], self._all[fourth]) for before_last, fourth in pairs)
            for block in (MODEL, MODEL + 1):
                span = repeat.instance(block)
                self._starts[self._all[span.start]] = fold, block
                self._ends[self._all[span.stop - 1]] = fold, block
        self._met: dict[tuple[Fold, int, bool], frozenset[tuple[TensorRef, ...]]] = {}
        self._last_read: dict[TensorRef, int] = {}  # by storage: the position of the last op that reads it
        self._forward = self._forward_points()
        self._backward = self._backward_points() if self.memory.train else {}
        differing = [fold for fold in self._folds if not self._met_alike(fold)]
        self._folds = [fold for fold in self._folds if fold not in differing]
        return not differing

    def _met_alike(self, fold: Fold) -> bool:
        """Whether the same lives when the walks enter a fold's model block and when they enter the next block."""
        for backward in (False, True):
            model, behind = (self._met.get((fold, MODEL + i, backward), frozenset()) for i in range(2))
            if {tuple(self._behind(fold, ref) for ref in refs) for refs in model} != behind:
                return False
        return True

    def _behind(self, fold: Fold, ref: TensorRef) -> TensorRef:
        """The same tensor of the next block that the walks visit, which after the fourth block is the last."""
        block = fold.block(self.position[ref.node])
        return fold.moved(ref, fold.repeat.count - 1 - block if block == MODEL + 1 else 1)

    def _inputs(self, node: fx.Node) -> list[TensorRef]:
        refs = self.memory.inputs[node]
        if not self._stands or not any(ref.node in self._stands for ref in refs):
            return refs
        return [TensorRef(self._stands.get(ref.node, ref.node), ref.index) for ref in refs]

    def _fold_of(self, node: fx.Node) -> tuple[Fold, int] | None:
        """The fold of which a node's block is a middle block, and the block's number."""
        for fold in self._folds:
            block = fold.block(self.position[node])
            if block in fold.middle:
                return fold, block
        return None

    def last_use(self, parameter: fx.Node) -> fx.Node | None:
        """The last reader of a parameter, from which its first gradient comes."""
        return max(parameter.users, key=self.position.__getitem__, default=None)

    def waiting(self, parameter: fx.Node, transfer: TransferBytes) -> tuple[int, int]:
        """Bytes of a parameter's gradient that wait for its bucket from the op on that gives its first part, and bytes
        that are there at that op alone. If several ops read the parameter, each adds its part to the sum, which may be
        what earlier micro-batches left: then all is there at the op alone."""
        several = sum(map(in_segment, parameter.users)) > 1
        adds = several and self.memory.micro_batches > 1 and transfer.reduction > 0
        return (0, transfer.waiting) if adds else (transfer.waiting, transfer.cast)

    def points(self, node: fx.Node) -> tuple[Point, ...]:
        """The points of one op; none of placeholders and parameters. The output is a point too: in a step only for the
        conversion of what is returned, while in a pass without backward that lives from its maker on."""
        over = node.op == "output"
        if not over and (not in_segment(node) or is_getitem(node) or COST not in node.meta):
            return ()
        fold = self._fold_of(node)
        model = fold[0].model_of(node) if fold else node
        points = [point for of in (self._forward, self._backward) if (point := of.get(model)) is not None]
        if fold and model is not node:
            return tuple(self._moved(point, node, *fold) for point in points)
        return tuple(self._in_place(point) for point in points) if self._stands else tuple(points)

    def _moved(self, point: Point, node: fx.Node, fold: Fold, block: int) -> Point:
        """A point of the model block as that of another middle block."""
        return point.at(node, lambda ref: fold.moved(ref, block - MODEL))

    def _in_place(self, point: Point) -> Point:
        """A point with tensors of the block before a last one in place of those that stand for them."""
        for fold in self._folds:
            if fold.block(self.position[point.node]) == fold.repeat.count - 1:
                return point.at(point.node, partial(self._before_last, fold))
        return point

    def _before_last(self, fold: Fold, ref: TensorRef) -> TensorRef:
        behind = fold.block(self.position[ref.node]) == MODEL + 1
        return fold.moved(ref, fold.repeat.count - 2 - (MODEL + 1)) if behind else ref

    def left_to_do(self, position: int) -> Point | None:
        """The next point of backward after it has run all ops from a position on, or None; the gradients that live then
        are in its `passing`."""
        for node in reversed(self._all[:position]):
            for point in self.points(node):
                if point.backward:
                    return point
        return None

    def after_parameters(self, node: fx.Node) -> bool:
        """Whether an op comes after all that read parameters, and so belongs to the loss."""
        return self.position[node] > self._last_reader

    def stays_within(self, root: TensorRef, first: int, last: int) -> bool:
        """Whether a storage is made and read only by nodes at positions from `first` to `last`."""
        fold = self._fold_of(root.node)
        if fold:
            root, distance = fold[0].moved(root, MODEL - fold[1]), (fold[1] - MODEL) * fold[0].repeat.period
            first, last = first - distance, last - distance
        inside = first <= self.position[root.node] and self._last_read.get(root, first) <= last
        return inside and in_segment(root.node) and root not in self._returned

    def unsaved(self, node: fx.Node) -> list[int]:
        """The inputs of an op that no earlier op keeps for backward."""
        fold = self._fold_of(node)
        at = self.position[model := fold[0].model_of(node) if fold else node]
        roots = [self.memory.roots[ref] for ref in self._inputs(model)]
        return [j for j, root in enumerate(roots) if self._first_saver.get(root, at) >= at]

    def gradients_made(self, point: Point) -> list[tuple[int, TensorRef]]:
        """The inputs of `Point.made`, with their places."""
        inputs = self._inputs(self._model_of(point.node))
        return [(j, inputs[j]) for j in point.made]

    def unkept(self, node: fx.Node, strategy: Strategy) -> tuple[set[Copy], set[Copy]]:
        """Copies that an op reads, and those that it makes, which neither it nor an earlier op keeps for backward;
        parameters apart."""
        memory, node = self.memory, self._model_of(node)
        outputs = [TensorRef(node, i) for i in range(len(strategy.outputs))]
        read, made = (
            {memory.copy(*one) for one in zip(refs, layouts, strict=True) if self.is_unkept(node, one[0])}
            for refs, layouts in ((self._inputs(node), strategy.inputs), (outputs, strategy.outputs))
        )
        return read, made

    def is_unkept(self, node: fx.Node, ref: TensorRef) -> bool:
        """Whether neither this op nor an earlier one keeps a tensor that it reads or makes; False for parameters."""
        root = self.memory.roots[ref]
        kept = self._first_saver.get(root, len(self._all)) <= self.position[node]
        return not kept and not self.memory.is_parameter(root.node)

    def is_kept_by_maker(self, ref: TensorRef) -> bool:
        """Whether the op that makes a tensor's storage keeps it for backward; False for inputs and parameters."""
        root = self.memory.roots[ref]
        model = TensorRef(self._model_of(root.node), root.index)
        return in_segment(root.node) and self._first_saver.get(model) == self.position[model.node]

    def _model_of(self, node: fx.Node) -> fx.Node:
        """The model block's node in place of a node of a fold's middle block; other nodes stay."""
        fold = self._fold_of(node)
        return fold[0].model_of(node) if fold else node

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward_points(self) -> dict[fx.Node, Point]:
        memory, roots = self.memory, self.memory.roots
        self._first_saver: dict[TensorRef, int] = {}
        last, never = self._last_read, len(self._all)
        for node in self._nodes:
            refs, at = self._inputs(node), self.position[node]
            for inputs, outputs, _ in (memory.saved(node), memory.savings.held(node)):
                for ref in [refs[j] for j in inputs] + [TensorRef(node, j) for j in outputs]:
                    self._first_saver.setdefault(roots[ref], at)
            if in_segment(node) and not is_getitem(node):
                last.update((roots[ref], at) for ref in refs)
        returned = (ref for node in self._nodes if node.op == "output" for ref in self._inputs(node))
        self._returned = {roots[ref] for ref in returned}
        if not self.memory.train:
            last.update(dict.fromkeys(self._returned, never))
        points: dict[fx.Node, Point] = {}
        live: dict[TensorRef, None] = {}
        for node in self._nodes:
            at = self.position[node]
            if node in self._starts:
                still = (r for r in live if last[r] >= at and self._first_saver.get(r, never) >= at)
                self._met[(*self._starts[node], False)] = frozenset((ref,) for ref in still)
            over = node.op == "output"
            if (not in_segment(node) and not over) or is_getitem(node):
                continue
            live = {r: None for r in live if last[r] >= at and self._first_saver.get(r, never) > at}
            own = {roots[ref] for ref in self._inputs(node)}
            passing = tuple(r for r in live if r not in own)
            points[node] = Point(node, False, passing, view=memory.train if over else self._is_view(node))
            for index in range(len(output_tensors(node))):
                root = roots[TensorRef(node, index)]
                if root.node is node and last.get(root, at) > at:
                    live[root] = None
        return points

    def _is_view(self, node: fx.Node) -> bool:
        cost = node.meta.get(COST)
        return cost is None or (bool(cost.alias_of) and None not in cost.alias_of)

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_points(self) -> dict[fx.Node, Point]:
        memory = self.memory
        points: dict[fx.Node, Point] = {}
        live = GradientStorages(memory, {node: self._inputs(node) for node in self._nodes})
        for node in reversed(self._nodes):
            if node in self._ends:
                self._met[(*self._ends[node], True)] = live.state
            if node.op == "output":
                live.enter(ref for ref in self._inputs(node) if gradient_enters(memory, node, ref))
                continue
            mine = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
            if not in_segment(node) or not any(ref in live for ref in mine):
                continue
            made = self._made(node, live)
            passing, awaited, apart = live.storages, live.awaited(node), live.apart(node)
            live.give(node, made)
            view = not made and not self._works_backward(node)
            if not view or self._is_view(node):
                left = set(live.storages)
                over = tuple(r for r in passing if r not in left)
                points[node] = Point(node, True, passing, tuple(made), over, view, awaited, apart)
            live.name()
        return points

    def _made(self, node: fx.Node, live: GradientStorages) -> list[int]:
        """The inputs for whose gradients an op makes a tensor, rather than passing on its output's; a parameter counts
        only if it has a gradient already, to which this one is added."""
        alias = node.meta[COST].gradient_alias_of if COST in node.meta else ()
        made = []
        for j, ref in enumerate(self._inputs(node)):
            source = alias[j] if j < len(alias) else None
            shared = source is not None and TensorRef(node, source) in live
            first = self.memory.is_parameter(ref.node) and not self._used_after(ref.node, node)
            if needs_grad(self.memory, ref) and not shared and not first:
                made.append(j)
        return made

    def _works_backward(self, node: fx.Node) -> bool:
        cost = node.meta.get(COST)
        return cost is not None and bool(cost.moved_bytes_backward or cost.workspace_backward_bytes)

    def _used_after(self, parameter: fx.Node, node: fx.Node) -> bool:
        """Whether backward has a gradient of the parameter already when it reaches this reader."""
        return any(self.position[user] > self.position[node] for user in parameter.users if in_segment(user))
