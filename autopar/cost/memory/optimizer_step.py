"""What torch's optimizers take during a step: bytes of temporaries, and seconds.

A loop over parameters holds a temporary of the parameter before until the variable is assigned again, so the next
parameter's temporaries are made beside it. If all are updated at once (foreach, as on CUDA), each temporary is there
for all parameters.

Muon (https://kellerjordan.github.io/posts/muon) updates matrices one after another, on CUDA too, by five Newton-Schulz
steps in bfloat16; AdamW updates the other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from autopar.cluster import Device
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout

if TYPE_CHECKING:
    from autopar.cost.memory.formulas import StepMemory
    from autopar.cost.memory.planned_bytes import PlannedBytes


@dataclass(frozen=True)
class Temporaries:
    """Bytes of temporaries for one parameter: its `own`; what of these is `left` during the update of the next; and
    `at_once`, those beside the temporaries of all others, if all are updated together."""

    own: int
    left: int
    at_once: int


_ADAM = Temporaries(2, 1, 1)  # the denominator: a root and its quotient; at once, the root is divided in place
_MULTIPLES = {  # of a parameter's gradient
    "adamw": _ADAM,
    "adam": _ADAM,
    "adafactor": Temporaries(1, 1, 1),  # its update
    "sgd": Temporaries(0, 0, 0),
    "sgd-momentum": Temporaries(0, 0, 0),
    "lion": Temporaries(2, 0, 0),  # a copy of the momentum, and its sum with the gradient, as in lion-pytorch
    "muon": _ADAM,
}
_ONE_BY_ONE = {"lion"}  # on every device
_NEWTON_SCHULZ_STEPS = 5
_BFLOAT16_BYTES = 2


def temporaries(memory: StepMemory, node: fx.Node, storage: Layout) -> Temporaries:
    """Those of one parameter in the step of the optimizer; `StepMemory.optimizer_at_once` says how it steps."""
    gradient = memory.gradient_bytes(node, storage)
    if shape := _orthogonalised(memory, node):
        products = _BFLOAT16_BYTES * min(shape) ** 2  # matrix times its transpose, and the polynomial of that
        kept = 2 if storage.is_replicated else 3
        # the update, then the matrix before and after a step; sharded, products are joined in yet another tensor
        return Temporaries(gradient + 2 * _bfloat16_bytes(memory, node, storage) + kept * products, 0, 0)
    many = _MULTIPLES[memory.optimizer]
    if memory.optimizer_at_once and memory.optimizer not in _ONE_BY_ONE:
        return Temporaries(0, 0, many.at_once * gradient)
    return Temporaries(many.own * gradient, many.left * gradient, 0)


def update_seconds(memory: StepMemory, node: fx.Node, storage: Layout, device: Device) -> float:
    """Seconds of a parameter's update: its memory traffic, and Muon's products. The latter's collectives are left
    out."""
    seconds = device.update_seconds(memory.optimizer_traffic_bytes(node, storage))
    if shape := _orthogonalised(memory, node):
        side, elements = min(shape), _bfloat16_bytes(memory, node, storage) // _BFLOAT16_BYTES
        flops = _NEWTON_SCHULZ_STEPS * (4 * side * elements + 2 * side**3)
        rate = device.flops_per_s.get("bfloat16") or device.flops_per_s["float32"]
        seconds += flops / (rate * device.efficiency)
    return seconds


def _orthogonalised(memory: StepMemory, node: fx.Node) -> tuple[int, ...]:
    """The shape of a matrix that Muon updates, () for other parameters and optimizers."""
    shape = tuple(tensor_of(TensorRef(node, 0)).shape)
    return shape if memory.optimizer == "muon" and len(shape) == 2 and memory.is_trainable(node) else ()


def _bfloat16_bytes(memory: StepMemory, node: fx.Node, storage: Layout) -> int:
    """Bytes of a rank's part of a parameter, cast."""
    return memory.gradient_bytes(node, storage) // memory.stored_dtype(node).itemsize * _BFLOAT16_BYTES


def successive(memory: StepMemory) -> Iterator[tuple[fx.Node | None, fx.Node]]:
    """The trained parameters, each with the one before it, in the model's order, which is the optimizer's.

    Parameters that the graph does not read have no gradients, and the optimizer leaves them out.
    """
    nodes = {str(node.target): node for node in memory.graph.nodes if memory.is_trainable(node)}
    before: fx.Node | None = None
    for name in memory.parameters:
        if name in nodes:
            yield before, nodes[name]
            before = nodes[name]


def temporaries_bytes(plan: PlannedBytes) -> int:
    """Bytes of the temporaries that are there at once in the optimizer's step under a plan."""
    memory, parameters = plan.memory, plan.distinct_parameters
    of = {node: temporaries(memory, node, storage) for node, storage, _ in parameters}
    most = 0
    for before, node in successive(memory):
        left = of[plan.stands_for(before)].left if before is not None else 0
        most = max(most, left + of[plan.stands_for(node)].own)
    return most + sum(of[node].at_once * count for node, _, count in parameters)
