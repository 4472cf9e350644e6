"""The moments of a training step's forward, for the regions where it may hold the peak (`cost.memory.forward_part`).

There live what lives throughout; what the regions before keep for backward, and this one up to an op (a recomputed
region as if it kept what its replay saves, which is no less than its values that are still to be read); the op's own
tensors; values that are still to be read and that no op keeps; copies of parameters (`cost.memory.gathers`); and the
gradients that earlier micro-batches have left.
"""

from __future__ import annotations

from collections import Counter

from autopar.cost.memory.formulas import Copy
from autopar.cost.memory.forward_part import ForwardPart
from autopar.cost.memory.gathers import Gathers
from autopar.cost.memory.growth import Growth
from autopar.cost.memory.planned_bytes import PlannedBytes


class TrainingForward:
    """The moments of a plan's forward."""

    def __init__(self, plan: PlannedBytes, part: ForwardPart) -> None:
        self.plan, self.regions = plan, part.regions
        self.gathers = Gathers(plan, part.memory, part.grouping)
        shared, some = plan.grouping, range(part.grouping.regions) if part.landings else ()
        self.landings = {i for i in some if shared.begins(i) and shared.goes_on(i)} - part.regions
        self.landing = Gathers(plan, part.memory, part.grouping.divided(plan.apart)) if plan.apart else self.gathers

    def fullest(self, i: int, kept: set[Copy]) -> Counter[str] | None:
        """The largest point of a region's forward, by part; None if none counts. `kept`: storages that are there
        already."""
        if i not in self.regions and i not in self.landings:
            return None
        gathers = self.landing if i in self.landings else self.gathers
        arrivals, growth = gathers.region(i), Growth(self.plan, i, kept, backward=False)
        most, best = -1, None
        for node in self.plan.members[i]:
            growth.begin(node)
            before = growth.parts.copy()
            growth.keep(node)
            for case in arrivals.at(node):
                if i in self.landings and not case.lands:
                    continue
                grown, size = before if case.lands else growth.parts, arrivals.beside(case)
                if (total := grown.total() + case.copies + case.moved + size) > most:
                    own = "logits and loss" if self.plan.memory.lifetimes.after_parameters(node) else "workspace"
                    moving = {"gathered parameters": case.copies, "communication buffers": case.moved}
                    most, best = total, grown + Counter({**moving, own: size})
        return best
