"""Which gradients of activations live as backward walks a graph, and which are one tensor: from the graph alone.

A tensor's gradient lives from the backward of its last reader, where readers' gradients are added up, to that of its
maker. Some gradients are other gradients: those of views, and both of an addition's (`NodeCost.gradient_alias_of`).
Autograd adds to the first in place, unless somebody else holds it or it is a view (`accumulate` in torch's
`input_buffer.cpp`); then the sum is another tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.point import Read
from autopar.cost.traffic import in_segment, needs_grad
from autopar.graph import COST, TensorRef, is_getitem, output_tensors, tensor_of

if TYPE_CHECKING:
    from autopar.cost.memory.formulas import StepMemory


class GradientStorages:
    """What lives so far; `inputs`: the tensors that each op reads, in the order of the graph."""

    def __init__(self, memory: StepMemory, inputs: Mapping[fx.Node, Sequence[TensorRef]]) -> None:
        self.memory, self.position = memory, {node: i for i, node in enumerate(inputs)}
        self.inputs = inputs
        self._of: dict[TensorRef, TensorRef] = {}  # the storage of each gradient, named by the tensor it was made for
        self._views: set[TensorRef] = set()  # tensors whose gradients are views
        self._handed: dict[TensorRef, tuple[Read, ...]] = {}  # through which reads a gradient came to be another's
        self._to_come: dict[TensorRef, list[Read]] = defaultdict(list)
        for node, refs in inputs.items():
            if in_segment(node) and not is_getitem(node) and any(t.requires_grad for t in output_tensors(node)):
                for place, ref in enumerate(refs):
                    self._to_come[ref].append(Read(ref, TensorRef(node, place)))

    def __contains__(self, ref: TensorRef) -> bool:
        return ref in self._of

    def enter(self, refs: Iterable[TensorRef]) -> None:
        """Here backward begins."""
        self._of.update((ref, ref) for ref in refs)

    @property
    def state(self) -> frozenset[tuple[TensorRef, ...]]:
        """Equal where the same lives."""
        found = []
        for ref, storage in self._of.items():
            handed = [one for read in self._handed.get(ref, ()) for one in read]
            found.append((ref, storage, *handed, *([ref] if ref in self._views else [])))
        return frozenset(found)

    @property
    def storages(self) -> tuple[TensorRef, ...]:
        """The tensors after which storages are named."""
        return tuple(dict.fromkeys(self._of.values()))

    def awaited(self, at: fx.Node) -> tuple[Read, ...]:
        """Tensors whose gradients are their own, with the next reader, from an op on towards the front."""
        reads = ((ref, self._next(ref, at)) for ref, storage in self._of.items() if ref == storage)
        return tuple(read for _, read in reads if read is not None)

    def apart(self, at: fx.Node) -> tuple[tuple[Read, ...], ...]:
        """The reads through which gradients are others', with the next of the same tensor that is to come."""
        found: dict[tuple[Read, ...], None] = {}
        for ref, reads in self._handed.items():
            for read in reads:
                to_come = self._next(ref, at) if read.tensor == ref else None
                found[(read, to_come) if to_come is not None else (read,)] = None
        return tuple(found)

    def _next(self, ref: TensorRef, at: fx.Node) -> Read | None:
        reads = self._to_come[ref]
        while reads and self.position[reads[-1].by.node] > self.position[at]:
            reads.pop()
        return reads[-1] if reads else None

    def give(self, node: fx.Node, made: list[int]) -> None:
        """An op's backward: its outputs' gradients go, its inputs' come. To `made`, which has the inputs whose
        gradients it makes, are added those of which a sum is another tensor."""
        cost = node.meta.get(COST)
        alias, views = (cost.gradient_alias_of, cost.gradient_is_view) if cost is not None else ((), ())
        outputs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
        storages = {ref.index: self._of.pop(ref, None) for ref in outputs}
        handed = {ref.index: self._handed.pop(ref, ()) for ref in outputs}
        viewed = {ref.index for ref in outputs if ref in self._views}
        self._views.difference_update(outputs)
        given: list[tuple[TensorRef, int, TensorRef | None, tuple[Read, ...]]] = []
        for place, ref in enumerate(self.inputs[node]):
            if needs_grad(self.memory, ref) and not self.memory.is_parameter(ref.node):
                source = alias[place] if place < len(alias) else None
                shared = storages.get(source) if source is not None else None
                before = handed[source] if source is not None and shared is not None else ()
                given.append((ref, place, shared, (Read(ref, TensorRef(node, place)), *before)))
        holders = Counter(self._of.values())
        holders.update(shared for _, _, shared, _ in given if shared is not None)
        for ref, place, shared, reads in given:
            old = self._of.get(ref)
            if old is None:
                self._of[ref] = shared or ref
                if shared is not None:
                    self._handed[ref] = reads
                is_handed_view = shared is not None and alias[place] in viewed
                if is_handed_view or (place < len(views) and views[place]):
                    self._views.add(ref)
            elif holders[old] > 1 or ref in self._views:
                made.append(place)
                self._of[ref] = ref
                self._handed.pop(ref, None)
                self._views.discard(ref)

    def name(self) -> None:
        """Name each storage that one tensor has left after that: the others' layouts say nothing about it any more. Not
        where it has a part alone (what `stack` read, say): all of it is there as long as that."""
        holders = Counter(self._of.values())
        for ref, storage in self._of.items():
            if holders[storage] == 1 and tensor_of(ref).nbytes >= tensor_of(storage).nbytes:
                self._of[ref] = ref
                self._handed.pop(ref, None)
