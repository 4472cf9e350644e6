"""What one op has alive for a moment at its points (`autopar.cost.lifetimes`), in bytes.

The op's own tensors; what it reads as its maker has it, where collectives make of it what the op wants; and, while they
do, what they stage (`autopar.staging`). Then the op's results are not there yet, and in backward those gradients are
gone that it was the last to need; so of a point there lives

    own + passing + conversions + max(0, the largest that is staged - what is not there meanwhile).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.cost.lifetimes import Lifetimes, Point
from autopar.cost.local_workspace import workspace_bytes
from autopar.cost.memory import StepMemory
from autopar.cost.traffic import conversion_moves, needs_grad
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.reshard import steps
from autopar.staging import memory_order, staged_elements

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy


def own_bytes(lifetimes: Lifetimes, point: Point, strategy: Strategy) -> int:
    """What the op itself has."""
    memory = lifetimes.memory
    found = workspace_bytes(point.node, strategy, memory.mesh_shape, backward=point.backward)
    if point.backward:
        gradients = lifetimes.gradients_made(point)
        return found + sum(memory.local_bytes(ref, strategy.inputs[j]) for j, ref in gradients)
    read, made = lifetimes.unkept(point.node, strategy)
    return found + sum(map(memory.copy_bytes, read | made))


def not_while_converting_bytes(lifetimes: Lifetimes, point: Point, strategy: Strategy) -> int:
    """What the op has at a point and not while its inputs, or their gradients, are converted; `Point.over` apart."""
    memory = lifetimes.memory
    found = workspace_bytes(point.node, strategy, memory.mesh_shape, backward=point.backward)
    if point.backward:
        return found
    read, made = lifetimes.unkept(point.node, strategy)
    return found + sum(map(memory.copy_bytes, made - read))


def conversion_bytes(memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """An input as its maker has it, beside the same as the op wants it, where collectives make one of the other."""
    ends, mesh = _ends(memory, point, ref, source, wanted), memory.mesh_shape
    if ends is None:
        return 0
    forward, backward = conversion_moves(ref, *ends, mesh, needs_grad=needs_grad(memory, ref))
    moves = any(mesh[move.axis] > 1 for move in (backward if point.backward else forward))
    return memory.local_bytes(ref, ends[0]) if moves else 0


def staging_bytes(memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout) -> int:
    """What a conversion of an input, or of its gradient, has besides for a moment."""
    ends, tensor, mesh = _ends(memory, point, ref, source, wanted), tensor_of(ref), memory.mesh_shape
    if ends is None:
        return 0
    shape = tuple(tensor.shape)
    path = steps(*ends, shape, mesh, needs_grad=needs_grad(memory, ref))
    return staged_elements(path, shape, mesh, memory_order(tensor))[point.backward] * tensor.dtype.itemsize


def _ends(
    memory: StepMemory, point: Point, ref: TensorRef, source: Layout, wanted: Layout
) -> tuple[Layout, Layout] | None:
    """The layouts between which an input, or its gradient, is converted at a point; None where nothing is."""
    grad = needs_grad(memory, ref)
    if source == wanted or (point.backward and not grad):
        return None
    return (source, wanted) if grad else (source.value(), wanted.value())
