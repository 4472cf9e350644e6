"""What one op has alive for a moment at its points (`cost.memory.point`), in bytes.

The op's own tensors; what it reads as its maker has it, where another tensor is made of it that lies as the op wants;
and, while it is, what collectives stage (`resharding.staging`). Then the op's results are not there yet, and in
backward those gradients are gone that it was the last to need; so of a point there lives

    own + passing + conversions + max(0, the largest that is staged - what is not there meanwhile).
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
    """Of a plan, which has `chosen` a strategy for each op."""

    def __init__(self, memory: StepMemory, chosen: Mapping[fx.Node, Strategy]) -> None:
        self.memory, self.chosen = memory, chosen

    def bytes_at(self, point: Point) -> int:
        """What lives for a short while at a point."""
        memory, strategy = self.memory, self.chosen[point.node]
        found = own_bytes(memory.lifetimes, point, strategy) + self.passing_bytes(point)
        staged = 0
        for ref, wanted in dict.fromkeys(zip(memory.inputs[point.node], strategy.inputs, strict=True)):
            if not memory.is_parameter(ref.node):
                source = self.chosen[ref.node].outputs[ref.index]
                found += conversion_bytes(memory, point, ref, source, wanted)
                staged = max(staged, staging_bytes(memory, point, ref, source, wanted))
        if staged:
            staged -= not_while_converting_bytes(memory.lifetimes, point, strategy) + self._local_bytes(point.over)
        return found + max(0, staged)

    def passing_bytes(self, point: Point) -> int:
        """Other tensors' values or gradients that live at a point, and in backward the gradients of the op's own."""
        found = self._local_bytes(point.passing)
        for read in point.awaited:
            found += awaited_bytes(self.memory, read.tensor, *self._layouts(read))
        for read, *to_come in point.apart:
            source, wanted = self._layouts(read)
            if all(self._layouts(other)[1] != wanted for other in to_come):
                found += apart_bytes(self.memory, read.tensor, source, wanted)
        return found

    def _layouts(self, read: Read) -> tuple[Layout, Layout]:
        """How what is read lies, and how it is wanted."""
        (maker, output), (reader, place) = read
        return self.chosen[maker].outputs[output], self.chosen[reader].inputs[place]

    def _local_bytes(self, refs: Iterable[TensorRef]) -> int:
        """Values or gradients, as they lie where they are made."""
        return sum(self.memory.local_bytes(ref, self.chosen[ref.node].outputs[ref.index]) for ref in refs)


def own_bytes(lifetimes: Lifetimes, point: Point, strategy: Strategy) -> int:
    """What the op itself has; of what a step returns, what its caller has is told by `cost.memory.returned`."""
    memory = lifetimes.memory
    if point.node.op == "output" and memory.train:
        return 0
    found = workspace_bytes(point.node, strategy, memory.mesh_shape, backward=point.backward)
    if point.backward:
        gradients = lifetimes.gradients_made(point)
        return found + sum(memory.local_bytes(ref, strategy.inputs[j]) for j, ref in gradients)
    read, made = lifetimes.unkept(point.node, strategy)
    return found + sum(map(memory.copy_bytes, read | made))


def not_while_converting_bytes(lifetimes: Lifetimes, point: Point, strategy: Strategy) -> int:
    """What is counted of the op at a point and not there while its inputs, or their gradients, are converted: of
    forward, its results too, kept or not; `Point.over` apart."""
    memory, node = lifetimes.memory, point.node
    found = workspace_bytes(node, strategy, memory.mesh_shape, backward=point.backward)
    if point.backward:
        return found
    read, made = lifetimes.unkept(node, strategy)
    for _, outputs, beside in (memory.saved(node), memory.savings.held(node)):
        found += kept_bytes(node, strategy, memory.mesh_shape, beside)
        refs = [TensorRef(node, j) for j in outputs]
        made |= {memory.copy(ref, strategy.outputs[ref.index]) for ref in refs if memory.roots[ref].node is node}
    return found + sum(map(memory.copy_bytes, made - read))


def conversion_bytes(memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """An input, or its gradient, as its maker has it, beside the same as the op wants it, where collectives make one of
    the other; forward also where the op reads a slice."""
    ends = _ends(memory, point, ref, source, wanted)
    if ends is None:
        return 0
    another, moves = _makes(memory, ref, *ends, backward=point.backward)
    counts = moves or (another and not point.backward and slices_beside(memory, point.node, ref))
    return memory.local_bytes(ref, ends[0]) if counts else 0


def _makes(memory: StepMemory, ref: TensorRef, source: Layout, wanted: Layout, *, backward: bool) -> tuple[bool, bool]:
    """Whether a conversion makes another tensor, and whether by collectives."""
    shape, mesh = tuple(tensor_of(ref).shape), memory.mesh_shape
    path = steps(source, wanted, shape, mesh, needs_grad=needs_grad(memory, ref))
    moves = ((step.axis, step.backward if backward else step.forward) for step in path)
    another = makes_another(path, shape, mesh)[backward]
    return another, another and any(move and mesh[axis] > 1 for axis, move in moves)


def slices_beside(memory: StepMemory, node: fx.Node, ref: TensorRef) -> bool:
    """Whether what an op reads a slice of counts beside it: unless it is there anyway."""
    return memory.roots[ref].node.op not in ("placeholder", "get_attr") and memory.lifetimes.is_unkept(node, ref)


def awaited_bytes(memory: StepMemory, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """What a gradient has beyond its part as its tensor lies, while a reader is to come that wants it otherwise.

    As if all that gave theirs before want it so too. Nothing is taken off where that is less.
    """
    return max(0, memory.local_bytes(ref, wanted) - memory.local_bytes(ref, source))


def apart_bytes(memory: StepMemory, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """A gradient that would be another's, where a reader converts it."""
    if source == wanted:
        return 0
    another, _ = _makes(memory, ref, source, wanted, backward=True)
    return memory.local_bytes(ref, source) if another else 0


def staging_bytes(memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """What a conversion of an input, or of its gradient, has besides for a moment: a slice of a gradient, too."""
    ends, tensor, mesh = _ends(memory, point, ref, source, wanted), tensor_of(ref), memory.mesh_shape
    if ends is None:
        return 0
    shape = tuple(tensor.shape)
    path = steps(*ends, shape, mesh, needs_grad=needs_grad(memory, ref))
    found = staged_elements(path, shape, mesh, memory_order(tensor))[point.backward] * tensor.dtype.itemsize
    if point.backward and _makes(memory, ref, *ends, backward=True) == (True, False):
        return max(found, memory.local_bytes(ref, ends[0]))
    return found


def _ends(
    memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout
) -> tuple[Layout, Layout] | None:
    """The layouts between which an input, or its gradient, is converted at a point; None where nothing is."""
    grad = needs_grad(memory, ref)
    if source == wanted or (point.backward and not grad):
        return None
    return (source, wanted) if grad else (source.value(), wanted.value())
