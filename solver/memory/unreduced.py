"""Unreduced gradients that the micro-batches before the last leave, in the layouts in which ops read the parameters.

They are summed over micro-batches and reduced once. Ops that read a parameter in one layout leave one gradient,
whatever blocks they are in and whether these recompute. Rows count this exactly for a parameter that several regions
read (tied embeddings, a block in a loop); for a block's own parameter, they count one gradient for each op that reads
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.moving import moving
from autopar.solver.memory.stage_bytes import add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Pair


def unreduced(model: Model) -> Expression:
    """The bytes of all unreduced gradients."""
    memory, grouping, found = model.problem.memory, model.problem.grouping, Expression()
    alike: dict[tuple[int, Pair], tuple[int, list[int]]] = {}
    for flow in model.flows:
        ref, op = model.problem.ref(flow.tensor), model.problem.ops[flow.use.op]
        if not memory.is_trainable(ref.node):
            continue
        sizes: dict[int, int] = {}
        for (port, wanted), variable in flow.pairs.items():
            one = moving(memory, grouping, ref, port[0], wanted, regather=port[1])
            if one.reduction and one.accumulated:
                sizes[variable] = one.accumulated
                alike.setdefault((flow.tensor.source, (port, wanted)), (one.accumulated, []))[1].append(variable)
        if not grouping.shared(ref.node):
            for variable, size in sizes.items():
                add(found, variable, model.costs.count(op) * size)
    for (source, _), (size, readers) in alike.items():
        if grouping.shared(model.problem.ops[source].node):
            add(found, _any(model, readers), size)
    return found


def _any(model: Model, readers: Sequence[int]) -> int:
    """A variable that is at least 1 where any of some flows is 1."""
    found = model.program.variable("unreduced", whole=False)
    for variable in readers:
        model.program.at_least("unreduced", [(found, 1.0), (variable, -1.0)], 0.0)
    return found
