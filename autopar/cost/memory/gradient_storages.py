"""Which gradients of activations live as backward walks a graph, and which share a storage: from the graph alone.

A tensor's gradient lives from the backward of its last reader, where the sum over readers begins, to that of its maker.
Some gradients alias others: those of views, and those of both inputs of an addition (`NodeCost.gradient_alias_of`).
Autograd adds to the first reader's gradient in place, unless it is held elsewhere or is a view (`accumulate` in torch's
`input_buffer.cpp`); then the sum is a new tensor.
"""

from __future__ import annotations

import itertools
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
    """The gradients that live at one place of the walk; `inputs`: the tensors that each op reads, in graph order."""

    def __init__(self, memory: StepMemory, inputs: Mapping[fx.Node, Sequence[TensorRef]]) -> None:
        self.memory, self.position = memory, {node: i for i, node in enumerate(inputs)}
        self.inputs = inputs
        self._storage: dict[TensorRef, TensorRef] = {}  # of each live gradient, named by the tensor it was made for
        self._views: set[TensorRef] = set()  # tensors whose gradients are views
        self._handed: dict[TensorRef, tuple[Read, ...]] = {}  # reads by which a gradient aliases another
        self._to_come: dict[TensorRef, list[Read]] = defaultdict(list)
        for node, refs in inputs.items():
            if in_segment(node) and not is_getitem(node) and any(t.requires_grad for t in output_tensors(node)):
                for place, ref in enumerate(refs):
                    self._to_come[ref].append(Read(ref, TensorRef(node, place)))

    def __contains__(self, ref: TensorRef) -> bool:
        return ref in self._storage

    def enter(self, refs: Iterable[TensorRef]) -> None:
        """Start backward at these tensors."""
        self._storage.update((ref, ref) for ref in refs)

    @property
    def state(self) -> frozenset[tuple[TensorRef, ...]]:
        """A key that is equal where the same gradients live in the same storages."""
        gradients = []
        for ref, storage in self._storage.items():
            reads = itertools.chain.from_iterable(self._handed.get(ref, ()))
            gradients.append((ref, storage, *reads, *([ref] if ref in self._views else [])))
        return frozenset(gradients)

    @property
    def storages(self) -> tuple[TensorRef, ...]:
        """The live storages, each as the tensor after which it is named."""
        return tuple(dict.fromkeys(self._storage.values()))

    def awaited(self, at: fx.Node) -> tuple[Read, ...]:
        """The tensors whose gradients have storages of their own, each as its next read in backward from an op on."""
        reads = ((ref, self._next(ref, at)) for ref, storage in self._storage.items() if ref == storage)
        return tuple(read for _, read in reads if read is not None)

    def apart(self, at: fx.Node) -> tuple[tuple[Read, ...], ...]:
        """The reads by which gradients alias others, each with the next read in backward of the same tensor, if any."""
        reads_apart: dict[tuple[Read, ...], None] = {}  # in order, each once
        for ref, reads in self._handed.items():
            for read in reads:
                next_read = self._next(ref, at) if read.tensor == ref else None
                reads_apart[(read, next_read) if next_read is not None else (read,)] = None
        return tuple(reads_apart)

    def _next(self, ref: TensorRef, at: fx.Node) -> Read | None:
        reads = self._to_come[ref]
        while reads and self.position[reads[-1].by.node] > self.position[at]:
            reads.pop()
        return reads[-1] if reads else None

    def give(self, node: fx.Node, made: list[int]) -> None:
        """Run an op's backward: gradients of its outputs go, and those of its inputs come. `made`, the inputs for whose
        gradients it makes a tensor, is extended by those whose sum becomes a new tensor."""
        cost = node.meta.get(COST)
        alias, views = (cost.gradient_alias_of, cost.gradient_is_view) if cost is not None else ((), ())
        outputs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
        storages = {ref.index: self._storage.pop(ref, None) for ref in outputs}
        handed = {ref.index: self._handed.pop(ref, ()) for ref in outputs}
        viewed = {ref.index for ref in outputs if ref in self._views}
        self._views.difference_update(outputs)
        gradients: list[tuple[TensorRef, int, TensorRef | None, tuple[Read, ...]]] = []  # of the inputs
        for place, ref in enumerate(self.inputs[node]):
            if needs_grad(self.memory, ref) and not self.memory.is_parameter(ref.node):
                source = alias[place] if place < len(alias) else None
                shared = storages.get(source) if source is not None else None
                reads_before = handed[source] if source is not None and shared is not None else ()
                gradients.append((ref, place, shared, (Read(ref, TensorRef(node, place)), *reads_before)))
        holders = Counter(self._storage.values())
        holders.update(shared for _, _, shared, _ in gradients if shared is not None)
        for ref, place, shared, reads in gradients:
            old = self._storage.get(ref)
            if old is None:
                self._storage[ref] = shared or ref
                if shared is not None:
                    self._handed[ref] = reads
                is_handed_view = shared is not None and alias[place] in viewed
                if is_handed_view or (place < len(views) and views[place]):
                    self._views.add(ref)
            elif holders[old] > 1 or ref in self._views:
                made.append(place)
                self._storage[ref] = ref
                self._handed.pop(ref, None)
                self._views.discard(ref)

    def name(self) -> None:
        """Rename each storage that is left to one tensor after that tensor, whose layout it now has. Not if the tensor
        is only a part of it (an input of `stack`, say), as the whole storage then lives on."""
        holders = Counter(self._storage.values())
        for ref, storage in self._storage.items():
            if holders[storage] == 1 and tensor_of(ref).nbytes >= tensor_of(storage).nbytes:
                self._storage[ref] = ref
                self._handed.pop(ref, None)
