"""Seconds of handling parameters and accumulating gradients, beside the ops that read and make them.

In every micro-batch, every parameter is passed to its ops, and its gradient back. From the second micro-batch on,
gradients are added to those of the micro-batches before, unreduced and in the layout in which the op wants the
parameter. The addition reads both and writes the sum, in the dtype in which gradients are summed.
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
    """Seconds of one micro-batch, on average over all, for the parameters that `node` reads."""
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
