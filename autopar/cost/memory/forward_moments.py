"""What lives on one device in a pass without backward: one moment for every region of the graph.

Nothing is saved for backward. At an op there live weights, the call's inputs, values that are read later or returned,
the op's own tensors, and copies of parameters (`cost.memory.forward_copies`).
"""

from __future__ import annotations

from collections import Counter

from autopar.cost.memory.forward_copies import ForwardCopies
from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.cost.structure.naming import stretch_name
from autopar.plans import Moment


def forward_moments(plan: PlannedBytes) -> tuple[Moment, ...]:
    """The moments of a plan for a pass without backward, in the order of the graph."""
    always, moments = _always(plan), []
    copies = ForwardCopies(plan, plan.memory, plan.grouping)
    for i, row in enumerate(plan.rows):
        parts = always + Counter(_fullest(plan, copies, i))
        name = stretch_name(plan.nodes[row.first : row.last + 1])
        moments.append(Moment(name, {part: size for part, size in parts.items() if size}))
    return tuple(moments)


def _always(plan: PlannedBytes) -> Counter[str]:
    memory, parts = plan.memory, Counter(plan.memory.fixed)
    for node, storage, count in plan.distinct_parameters:
        for part, size in memory.parameter_bytes(node, storage).items():
            parts[part] += count * size
    for node in (n for n in plan.nodes if n in plan.chosen):
        if node.op == "placeholder" or (node.op == "get_attr" and not memory.is_parameter(node)):
            parts["inputs and outputs"] += memory.input_bytes(node, plan.chosen[node].outputs[0])
    return parts


def _fullest(plan: PlannedBytes, copies: ForwardCopies, i: int) -> dict[str, int]:
    """Bytes by part at the largest point of a region, beside those that live throughout."""
    in_region, most, best = copies.region(i), -1, dict[str, int]()
    for node in plan.members[i]:
        for at in in_region.at(node):
            size = in_region.beside(at)
            if at.copies + at.in_flight + size > most:
                most = at.copies + at.in_flight + size
                best = {"gathered parameters": at.copies, "communication buffers": at.in_flight, "workspace": size}
    return best
