"""Gradients that the micro-batches before the last leave: unreduced ones, in the layouts in which ops read the
parameters, and sums of parts that come as gradients are stored.

Unreduced gradients are summed over micro-batches and reduced once. Ops that read a parameter in one layout leave one,
whatever blocks they are in and whether these recompute. Rows count this exactly for a parameter that several regions
read (tied embeddings, a block in a loop); for a block's own parameter, they count one gradient for each op that reads
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.transfer_bytes import transfer_bytes
from autopar.cost.traffic import in_segment
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
            one = transfer_bytes(memory, grouping, ref, port[0], wanted, regather=port[1])
            if one.reduction and one.accumulated:
                sizes[variable] = one.accumulated
                alike.setdefault((flow.tensor.source, (port, wanted)), (one.accumulated, []))[1].append(variable)
        if not grouping.shared(ref.node):
            for variable, size in sizes.items():
                add(found, variable, model.costs.count(op) * size)
    for (source, _), (size, readers) in alike.items():
        if grouping.shared(model.problem.ops[source].node):
            add(found, _any(model, [[reader] for reader in readers]), size)
    return found


def summed_as_stored(model: Model) -> Expression:
    """The bytes of all gradients as stored: one for each parameter of which any op gives a part that moves nowhere."""
    memory, grouping, found = model.problem.memory, model.problem.grouping, Expression()
    by_parameter: dict[int, dict[int, list[list[int]]]] = {}  # by size and reader: flows
    for flow in model.flows:
        ref = model.problem.ref(flow.tensor)
        if not memory.is_trainable(ref.node) or not in_segment(model.problem.ops[flow.use.op].node):
            continue
        by_size: dict[int, list[int]] = {}
        for (port, wanted), variable in flow.pairs.items():
            one = transfer_bytes(memory, grouping, ref, port[0], wanted, regather=port[1])
            if not one.reduction and one.accumulated:
                by_size.setdefault(one.accumulated, []).append(variable)
        for size, variables in by_size.items():
            by_parameter.setdefault(flow.tensor.source, {}).setdefault(size, []).append(variables)
    for source, sizes in by_parameter.items():
        count = model.costs.count(model.problem.ops[source])
        for size, readers in sizes.items():
            some = readers[0] if len(readers) == 1 else [_any(model, readers)]
            for variable in some:
                add(found, variable, count * size)
    return found


def _any(model: Model, readers: Sequence[Sequence[int]]) -> int:
    """A variable that is at least 1 where any of some flows is 1; of each reader's flows at most one is."""
    found = model.program.variable("unreduced", whole=False)
    for flows in readers:
        model.program.at_least("unreduced", [(found, 1.0), *((flow, -1.0) for flow in flows)], 0.0)
    return found
