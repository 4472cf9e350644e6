"""What torch's optimizers make for a moment while they step, in bytes.

One parameter after another, their loops hold what they made for the one before until its place is taken: the next one's
temporaries come beside it. All at once (foreach, as on CUDA), each temporary is there for all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

if TYPE_CHECKING:
    from autopar.cost.memory.formulas import StepMemory


@dataclass(frozen=True)
class Temporaries:
    """By the size of a parameter's gradient: its own; of these, what is left during the next one's; all at once."""

    own: int
    left: int
    at_once: int


_ADAM = Temporaries(2, 1, 1)  # the denominator: a root, and what it is divided by; at once it is divided in place
_TEMPORARIES = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "adafactor": Temporaries(1, 1, 1),  # its update
    "sgd": Temporaries(0, 0, 0),
    "sgd-momentum": Temporaries(0, 0, 0),
}


def temporaries(memory: StepMemory) -> Temporaries:
    """Those of the step's optimizer; how it steps is `StepMemory.optimizer_at_once`."""
    return _TEMPORARIES[memory.optimizer]


def successive(memory: StepMemory) -> Iterator[tuple[fx.Node | None, fx.Node]]:
    """The parameters that are trained, each with the one before it, in the order of the model and so of its optimizer.

    Those that the graph does not read have no gradients, and the optimizer leaves them out.
    """
    nodes = {str(node.target): node for node in memory.graph.nodes if memory.is_trainable(node)}
    before: fx.Node | None = None
    for name in memory.parameters:
        if name in nodes:
            yield before, nodes[name]
            before = nodes[name]
