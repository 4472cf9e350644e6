"""Whether a gradient's pieces are copied before they are copied into the buffer of its bucket's reduce-scatter."""

from __future__ import annotations

import math

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.traffic import needs_grad
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout, R
from autopar.resharding.reshard import Step, steps


def pieces_are_copied(memory: StepMemory, ref: TensorRef, storage: Layout, wanted: Layout) -> bool:
    """Whether the first collective that a parameter's gradient goes through takes copies of its pieces: those that are
    interleaved in memory (as over the inner of two axes that cut one dim), and ragged ones, which are padded. Other
    pieces are views of the gradient (`Cut.stack` in `autopar.runtime.communication.cuts`)."""
    shape, mesh = tuple(tensor_of(ref).shape), memory.mesh_shape
    cut = [(p.dim, p.outer, size) for p, size in zip(storage.placements, mesh, strict=True) if p.is_sharded]
    if all(outer == 1 and shape[dim] % size == 0 for dim, outer, size in cut):
        return False
    for step in reversed(steps(storage, wanted, shape, mesh, needs_grad=needs_grad(memory, ref))):
        if step.backward is not None and mesh[step.axis] > 1:
            return step.backward.kind == "reduce_scatter" and _copies(step, shape, mesh)
    return False


def _copies(step: Step, shape: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    cut, others = step.layout_before[step.axis], step.layout_before.replace(step.axis, R)
    if shape[cut.dim] % math.prod(digit.size for digit in step.layout_before.digits(cut.dim, mesh)):
        return True
    return cut.outer != math.prod(d.size for d in others.digits(cut.dim, mesh) if d.outer < cut.outer)
