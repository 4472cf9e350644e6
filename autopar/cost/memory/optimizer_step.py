"""Bytes of the temporaries of torch's optimizers during a step.

A loop over parameters holds a temporary of the parameter before until the variable is assigned again, so the next
parameter's temporaries are made beside it. If all are updated at once (foreach, as on CUDA), each temporary is there
for all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from autopar.cost.memory.formulas import StepMemory
    from autopar.cost.memory.planned_bytes import PlannedBytes


@dataclass(frozen=True)
class Temporaries:
    """Temporaries as multiples of a parameter's gradient: its `own`; what of these is `left` during the update of the
    next; and `at_once`, if all are updated together."""

    own: int
    left: int
    at_once: int


_ADAM = Temporaries(2, 1, 1)  # the denominator: a root and its quotient; at once, the root is divided in place
_TEMPORARIES = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "adafactor": Temporaries(1, 1, 1),  # its update
    "sgd": Temporaries(0, 0, 0),
    "sgd-momentum": Temporaries(0, 0, 0),
}


def temporaries(memory: StepMemory) -> Temporaries:
    """The temporaries of the step's optimizer; `StepMemory.optimizer_at_once` says how it steps."""
    return _TEMPORARIES[memory.optimizer]


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
    memory, each, parameters = plan.memory, temporaries(plan.memory), plan.distinct_parameters
    size = {node: memory.gradient_bytes(node, storage) for node, storage, _ in parameters}
    if memory.optimizer_at_once:
        return sum(each.at_once * size[node] * count for node, _, count in parameters)
    most = 0
    for before, node in successive(memory):
        left = each.left * size[plan.stands_for(before)] if before is not None else 0
        most = max(most, left + each.own * size[plan.stands_for(node)])
    return most
