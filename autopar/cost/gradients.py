"""Seconds that parameters and their gradients take beside the ops that read the one and make the other.

Every parameter is handed to its ops and its gradient back, once a micro-batch. Of several micro-batches each adds its
gradients to those before, as the ops give them: unreduced, of the layout in which the op wants the parameter. That
reads both and writes the sum, in the dtype in which gradients are summed; the first micro-batch has nothing to add to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from autopar.cluster import Device
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.traffic import reduction_dtype
from autopar.graph import tensor_of

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy


def gradient_seconds(memory: StepMemory, node: fx.Node, strategy: Strategy, device: Device) -> float:
    """Mean seconds of a micro-batch, for the parameters that `node` reads."""
    seconds, later = 0.0, 1 - 1 / memory.micro_batches
    for ref, wanted in zip(memory.inputs[node], strategy.inputs, strict=True):
        if not memory.is_trainable(ref.node):
            continue
        seconds += device.parameter_seconds
        if later:
            own = tensor_of(ref).dtype.itemsize
            elements = memory.local_bytes(ref, wanted) // own
            moved = elements * (own + 2 * reduction_dtype(memory, ref).itemsize)
            seconds += later * device.together(0.0, moved / device.bytes_per_s, device.launch_seconds)
    return seconds
