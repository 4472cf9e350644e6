"""Planning without pins that tell equal blocks apart: the plan that is found may meet them anyway.

Constraints only take plans away. So the best plan without some is the best with them, if it meets them; and without
these pins blocks are equal, and the program is small.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.formulas import StepMemory
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.solution import Solution


def without_parting(texts: Sequence[str], memory: StepMemory, restricted: Restricted) -> list[str] | None:
    """The constraints but pins, where these tell equal blocks of `memory` apart; None where none does, or where some
    demand recompute, of which more than one kind meets them."""
    if restricted.forces_replays or not any(repeat.of for repeat in memory.repeats):
        return None
    pins = {text for some in restricted.marks.values() for text in some}
    return [text for text in texts if text.strip() not in pins]


def meets(solution: Solution, memory: StepMemory, restricted: Restricted) -> bool:
    """Whether a solution has the ways that constraints leave, and recomputes nothing that is not to be."""
    if any(
        solution.chosen[node] not in some for node, some in restricted.strategies.items() if node in restricted.marks
    ):
        return False
    kept = [i for i, node in enumerate(memory.graph.nodes) if node in restricted.recompute]
    return not any(segment.first <= i <= segment.last for segment in solution.segments for i in kept)
