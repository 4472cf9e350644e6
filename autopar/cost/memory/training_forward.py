"""The moments of a training step's forward, for the regions where it may hold the peak (`cost.memory.forward_part`).

There live what lives throughout; what the regions before keep for backward, and this one up to an op (a recomputed
region as if it kept what its replay saves, which is no less than its values that are still to be read); the op's own
tensors; values that are still to be read and that no op keeps; copies of parameters (`cost.memory.forward_copies`);
and the gradients that earlier micro-batches have left.
"""

from __future__ import annotations

from collections import Counter

from autopar.cost.memory.formulas import Copy
from autopar.cost.memory.forward_copies import ForwardCopies
from autopar.cost.memory.forward_part import ForwardPart
from autopar.cost.memory.growth import Growth
from autopar.cost.memory.planned_bytes import PlannedBytes


class TrainingForward:
    """The moments of a plan's forward."""

    def __init__(self, plan: PlannedBytes, part: ForwardPart) -> None:
        self.plan, self.regions = plan, part.regions
        self.copies = ForwardCopies(plan, part.memory, part.grouping)
        grouping, candidates = plan.grouping, range(part.grouping.regions) if part.landings else ()
        self.landings = {i for i in candidates if grouping.begins(i) and grouping.goes_on(i)} - part.regions
        divided = part.grouping.divided(plan.apart) if plan.apart else None
        self.landing_copies = ForwardCopies(plan, part.memory, divided) if divided else self.copies

    def fullest(self, i: int, kept: set[Copy]) -> Counter[str] | None:
        """The largest point of a region's forward, by part; None if none counts. `kept`: storages that are there
        already."""
        if i not in self.regions and i not in self.landings:
            return None
        copies = self.landing_copies if i in self.landings else self.copies
        in_region, growth = copies.region(i), Growth(self.plan, i, kept, backward=False)
        most, best = -1, None
        for node in self.plan.members[i]:
            growth.begin(node)
            before = growth.parts.copy()
            growth.keep(node)
            for at in in_region.at(node):
                if i in self.landings and not at.lands:
                    continue
                grown, size = before if at.lands else growth.parts, in_region.beside(at)
                if (total := grown.total() + at.copies + at.in_flight + size) > most:
                    own = "logits and loss" if self.plan.memory.lifetimes.after_parameters(node) else "workspace"
                    parameters = {"gathered parameters": at.copies, "communication buffers": at.in_flight}
                    most, best = total, grown + Counter({**parameters, own: size})
        return best
