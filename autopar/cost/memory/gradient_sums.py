"""The layouts in which the ops of a plan read a parameter that several read: each has a sum of gradients of its own.

In backward, the sum of a layout begins with the part of the last op that reads the parameter so, and is reduced after
the first one. Results, and the sum of parts that come as the parameter is stored, stay until the end of backward, where
they are added up in place (`runtime.gradients`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from autopar.cost.memory.transfer_bytes import TransferBytes
from autopar.cost.traffic import in_segment
from autopar.graph import TensorRef
from autopar.layout import Layout

if TYPE_CHECKING:
    from autopar.cost.memory.planned_bytes import PlannedBytes


class GradientSum(NamedTuple):
    """The sum of the gradients in one layout in which a parameter is read: the last op that reads it so, and the
    transfers for it. `made`: bytes that the op's backward makes for a part of a sum, though it is the first part; 0 of
    the parameter's first sum."""

    reader: fx.Node
    transfer: TransferBytes
    made: int

    def later(self, *, shared: bool, first: bool) -> int:
        """Bytes while the regions before the reader's run backward. `shared`: several regions read the parameter, so
        that the sum waits for their parts; `first`: this is the parameter's first sum in backward."""
        waiting, reduced = self.transfer.waiting, self.transfer.reduced
        return (waiting if first else max(waiting, reduced)) if shared else reduced


def gradient_sums_of(plan: PlannedBytes, parameter: fx.Node) -> list[GradientSum]:
    """The sums of a parameter's gradients, in the order of backward."""
    memory, lifetimes = plan.memory, plan.memory.lifetimes
    readers = [user for user in parameter.users if in_segment(user) and user in plan.chosen]
    sums: dict[Layout, GradientSum] = {}
    for node in sorted(readers, key=lifetimes.position.__getitem__, reverse=True):
        reads = [(ref, wanted) for _, ref, wanted in plan.parameters_read(node) if ref.node is parameter]
        for ref, wanted in reads:
            if wanted not in sums:
                adds = bool(sums) and _adds(plan, node, parameter)
                made = memory.local_bytes(ref, wanted) if adds else 0
                sums[wanted] = GradientSum(node, plan.transfer(ref, wanted), made)
    return list(sums.values())


def home_of(plan: PlannedBytes, parameter: TensorRef, wanted: Layout) -> int:
    """The region after whose backward the gradients of a parameter in a layout are reduced: the first that reads it
    so."""
    if not plan.grouping.shared(parameter.node):
        return plan.grouping.home(parameter.node)
    readers = (user for user in parameter.node.users if user in plan.chosen)
    reads = ((user, read[1:]) for user in readers for read in plan.parameters_read(user))
    return min(plan.region_of[user] for user, read in reads if read == (parameter, wanted))


def _adds(plan: PlannedBytes, node: fx.Node, parameter: fx.Node) -> bool:
    """Whether a point of an op counts a part that is added to a parameter's gradient."""
    lifetimes, model = plan.memory.lifetimes, plan.stands_for(parameter)
    made = (ref for point in lifetimes.points(node) if point.backward for _, ref in lifetimes.gradients_made(point))
    return any(plan.stands_for(ref.node) is model for ref in made)
