"""Planning without the pins that make equal blocks differ: the plan that is found may meet them anyway.

Constraints only exclude plans. So if the best plan without some constraints meets them, it is the best with them too.
Without these pins the blocks stay equal, are folded, and the program is small.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.formulas import StepMemory
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.solution import Solution


def without_parting(texts: Sequence[str], memory: StepMemory, restricted: Restricted) -> list[str] | None:
    """The constraints without pins, if pins make equal blocks of `memory` differ. None if none do, or if some pin
    demands recompute, since several recomputes can meet such a pin."""
    if restricted.forces_replays or not any(repeat.of for repeat in memory.repeats):
        return None
    pins = {text for marks in restricted.marks.values() for text in marks}
    return [text for text in texts if text.strip() not in pins]


def meets(solution: Solution, memory: StepMemory, restricted: Restricted) -> bool:
    """Whether a solution meets the pins: its strategies are among those left, and no pinned op is recomputed."""
    if any(
        solution.chosen[node] not in strategies
        for node, strategies in restricted.strategies.items()
        if node in restricted.marks
    ):
        return False
    pinned = [i for i, node in enumerate(memory.graph.nodes) if node in restricted.recompute]
    return not any(segment.first <= i <= segment.last for segment in solution.segments for i in pinned)
