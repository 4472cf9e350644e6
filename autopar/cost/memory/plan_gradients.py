"""Bytes of a plan's gradients of parameters, by the op that makes them and by region."""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.cost.traffic import in_segment
from autopar.graph import TensorRef
from autopar.layout import Layout


class PlanGradients:
    """`waiting`: by op, the gradients it makes that wait in its region for their bucket; `cast`: those that it makes,
    in the dtype from which they are cast, less first parts of sums, which wait too; `later`: by region, its gradients
    while the regions before it run backward; `accumulated`: by part, gradients that earlier micro-batches leave."""

    def __init__(self, plan: PlannedBytes) -> None:
        self.waiting: Counter[fx.Node] = Counter()
        self.cast: Counter[fx.Node] = Counter()
        self.later = [0] * len(plan.rows)
        memory, several = plan.memory, plan.memory.micro_batches > 1
        for parameter, _ in plan.parameters:
            # where regions before also read the parameter, its gradient waits for their parts unreduced
            shared = plan.grouping.shared(parameter)
            sums = plan.gradient_sums(parameter) if memory.is_trainable(parameter) else ()
            for number, of_layout in enumerate(sums):
                waiting, cast = memory.lifetimes.waiting(parameter, of_layout.transfer)
                self.waiting[of_layout.reader] += waiting
                self.cast[of_layout.reader] += cast - of_layout.made
                if not several or (shared and not of_layout.transfer.reduction):
                    self.later[plan.region_of[of_layout.reader]] += of_layout.later(shared=shared, first=not number)
        self.accumulated = _accumulated(plan) if several else Counter[str]()


def _accumulated(plan: PlannedBytes) -> Counter[str]:
    """What micro-batches leave of each parameter: for each layout that its readers want an unreduced gradient, and one
    sum of the parts that come as the gradient is stored."""
    memory = plan.memory
    unreduced: dict[tuple[TensorRef, Layout], int] = {}
    stored: dict[TensorRef, int] = {}
    for node in (node for node in plan.nodes if node in plan.chosen):
        for ref, wanted in zip(memory.inputs[node], plan.chosen[node].inputs, strict=True):
            if not memory.is_trainable(ref.node):
                continue
            transfer = plan.transfer(ref, wanted)
            if transfer.reduction:
                unreduced[ref, wanted] = transfer.accumulated
            elif in_segment(node):
                stored[ref] = transfer.accumulated
    return Counter({"gradients": sum(stored.values()), "unreduced gradients": sum(unreduced.values())})
