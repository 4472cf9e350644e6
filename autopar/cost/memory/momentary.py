"""Bytes that live at one point of an op alone (`cost.memory.point`).

These are the op's own tensors; the inputs in their makers' layouts, where they are converted to the layouts that the op
wants; and, during a conversion, what its collectives stage (`resharding.staging`). While inputs are converted, the op's
results are not there yet, and while their gradients are, those gradients are gone that the op was the last to need. So
a point has

    own + passing + conversions + max(0, the most that a conversion stages - what is not there meanwhile).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.lifetimes import Lifetimes
from autopar.cost.memory.local_workspace import kept_bytes, workspace_bytes
from autopar.cost.memory.point import Point, Read
from autopar.cost.traffic import needs_grad
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.resharding.reshard import steps
from autopar.resharding.staging import makes_another, memory_order, staged_elements

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy


class Momentary:
    """The bytes at points under a plan's strategies (`chosen`)."""

    def __init__(self, memory: StepMemory, chosen: Mapping[fx.Node, Strategy]) -> None:
        self.memory, self.chosen = memory, chosen

    def bytes_at(self, point: Point) -> int:
        """All bytes that live at this point alone."""
        memory, strategy = self.memory, self.chosen[point.node]
        size = own_bytes(memory.lifetimes, point, strategy) + self.passing_bytes(point)
        staged = 0
        for ref, wanted in dict.fromkeys(zip(memory.inputs[point.node], strategy.inputs, strict=True)):
            if not memory.is_parameter(ref.node):
                source = self.chosen[ref.node].outputs[ref.index]
                size += conversion_bytes(memory, point, ref, source, wanted)
                staged = max(staged, staging_bytes(memory, point, ref, source, wanted))
        if staged:
            staged -= not_while_converting_bytes(memory.lifetimes, point, strategy) + self._local_bytes(point.over)
        return size + max(0, staged)

    def passing_bytes(self, point: Point) -> int:
        """Values or gradients of other tensors that live at a point, and in backward gradients of the op's outputs."""
        size = self._local_bytes(point.passing)
        for read in point.awaited:
            size += awaited_bytes(self.memory, read.tensor, *self._layouts(read))
        for read, *to_come in point.apart:
            source, wanted = self._layouts(read)
            if all(self._layouts(other)[1] != wanted for other in to_come):
                size += apart_bytes(self.memory, read.tensor, source, wanted)
        return size

    def _layouts(self, read: Read) -> tuple[Layout, Layout]:
        """The layout in which what is read was made, and the one in which it is wanted."""
        (maker, output), (reader, place) = read
        return self.chosen[maker].outputs[output], self.chosen[reader].inputs[place]

    def _local_bytes(self, refs: Iterable[TensorRef]) -> int:
        """Bytes of values or gradients in the layouts in which the values are made."""
        return sum(self.memory.local_bytes(ref, self.chosen[ref.node].outputs[ref.index]) for ref in refs)


def own_bytes(lifetimes: Lifetimes, point: Point, strategy: Strategy) -> int:
    """Bytes of the op itself; 0 for a step's output, as what the caller holds is in `cost.memory.returned`."""
    memory = lifetimes.memory
    if point.node.op == "output" and memory.train:
        return 0
    size = workspace_bytes(point.node, strategy, memory.mesh_shape, backward=point.backward)
    if point.backward:
        gradients = lifetimes.gradients_made(point)
        return size + sum(memory.local_bytes(ref, strategy.inputs[j]) for j, ref in gradients)
    read, made = lifetimes.unkept(point.node, strategy)
    return size + sum(map(memory.copy_bytes, read | made))


def not_while_converting_bytes(lifetimes: Lifetimes, point: Point, strategy: Strategy) -> int:
    """Bytes counted of the op at a point that are not there while its inputs, or their gradients, are converted: in
    forward its results too, kept or not. Without `Point.over`."""
    memory, node = lifetimes.memory, point.node
    size = workspace_bytes(node, strategy, memory.mesh_shape, backward=point.backward)
    if point.backward:
        return size
    read, made = lifetimes.unkept(node, strategy)
    for _, outputs, beside in (memory.saved(node), memory.savings.held(node)):
        size += kept_bytes(node, strategy, memory.mesh_shape, beside)
        refs = [TensorRef(node, j) for j in outputs]
        made |= {memory.copy(ref, strategy.outputs[ref.index]) for ref in refs if memory.roots[ref].node is node}
    return size + sum(map(memory.copy_bytes, made - read))


def conversion_bytes(memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """Bytes of an input, or its gradient, in its maker's layout, where these count beside the converted tensor: where
    collectives convert it and, in forward, also where the op reads a slice of it. Where the tensor is kept as it was
    made, but not the converted one, bytes of the latter."""
    ends = _ends(memory, point, ref, source, wanted)
    if ends is None:
        return 0
    another, moves = _makes(memory, ref, *ends, backward=point.backward)
    if not point.backward and reads_another_than_kept(memory, point.node, ref):
        return memory.local_bytes(ref, ends[1]) if another else 0
    counts = moves or (another and not point.backward and slices_beside(memory, point.node, ref))
    return memory.local_bytes(ref, ends[0]) if counts else 0


def _makes(memory: StepMemory, ref: TensorRef, source: Layout, wanted: Layout, *, backward: bool) -> tuple[bool, bool]:
    """Whether a conversion makes another tensor, and whether it does so by collectives."""
    shape, mesh = tuple(tensor_of(ref).shape), memory.mesh_shape
    path = steps(source, wanted, shape, mesh, needs_grad=needs_grad(memory, ref))
    moves = ((step.axis, step.backward if backward else step.forward) for step in path)
    another = makes_another(path, shape, mesh)[backward]
    return another, another and any(move and mesh[axis] > 1 for axis, move in moves)


def slices_beside(memory: StepMemory, node: fx.Node, ref: TensorRef) -> bool:
    """Whether a tensor counts beside the slice of it that an op reads: if it is not there anyway."""
    return memory.roots[ref].node.op not in ("placeholder", "get_attr") and memory.lifetimes.is_unkept(node, ref)


def reads_another_than_kept(memory: StepMemory, node: fx.Node, ref: TensorRef) -> bool:
    """Whether a tensor that an op reads is kept by the op that made it, as it was made, and not by this one: if it is
    converted, nobody keeps what this op reads."""
    saved = {memory.inputs[node][j] for j in memory.saved(node)[0]}
    return ref not in saved and memory.lifetimes.is_kept_by_maker(ref)


def awaited_bytes(memory: StepMemory, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """Bytes of a gradient beyond those in its tensor's layout, while backward has yet to reach a reader that wants the
    tensor in another layout.

    Assumes that all readers whose parts are there want it in that layout too. Nothing is taken off if that is smaller.
    """
    return max(0, memory.local_bytes(ref, wanted) - memory.local_bytes(ref, source))


def apart_bytes(memory: StepMemory, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """Bytes of a gradient that would share another's storage, but is a tensor of its own as a reader converts it."""
    if source == wanted:
        return 0
    another, _ = _makes(memory, ref, source, wanted, backward=True)
    return memory.local_bytes(ref, source) if another else 0


def staging_bytes(memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """Temporary bytes of a conversion of an input, or of its gradient; also a gradient that is cut to a slice."""
    ends, tensor, mesh = _ends(memory, point, ref, source, wanted), tensor_of(ref), memory.mesh_shape
    if ends is None:
        return 0
    shape = tuple(tensor.shape)
    path = steps(*ends, shape, mesh, needs_grad=needs_grad(memory, ref))
    staged = staged_elements(path, shape, mesh, memory_order(tensor))[point.backward] * tensor.dtype.itemsize
    if point.backward and _makes(memory, ref, *ends, backward=True) == (True, False):
        return max(staged, memory.local_bytes(ref, ends[0]))
    return staged


def _ends(
    memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout
) -> tuple[Layout, Layout] | None:
    """The layouts between which an input, or its gradient, is converted at a point; None if it is not."""
    grad = needs_grad(memory, ref)
    if source == wanted or (point.backward and not grad):
        return None
    return (source, wanted) if grad else (source.value(), wanted.value())
