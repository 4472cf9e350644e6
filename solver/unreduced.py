"""Gradients that micro-batches before the last leave in the layouts of their uses, which wait for the one reduction.

Ops that read a parameter in one layout leave one gradient, whatever blocks they are in; those in a recomputed segment
leave another for each. Of a parameter that several regions read (tied embeddings, a block in a loop), rows have it so,
with a segment for each op: from the level of recompute on at which the op is in one. Of a block's own, each op that
reads it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost.moving import moving
from autopar.solver.model import Model
from autopar.solver.replays import Expression, Flow, Pair, replays
from autopar.solver.stage_bytes import add


def unreduced(model: Model) -> Expression:
    """Bytes of all of them."""
    memory, grouping, found = model.problem.memory, model.problem.grouping, Expression()
    alike: dict[tuple[int, Pair], tuple[int, list[tuple[Flow, int]]]] = {}
    for flow in model.flows:
        ref, op = model.problem.ref(flow.tensor), model.problem.ops[flow.use.op]
        if not memory.is_trainable(ref.node):
            continue
        sizes: dict[int, int] = {}
        for (port, wanted), variable in flow.pairs.items():
            one = moving(memory, grouping, ref, port[0], wanted, regather=port[1])
            if one.reduction and one.accumulated:
                sizes[variable] = one.accumulated
                alike.setdefault((flow.tensor.source, (port, wanted)), (one.accumulated, []))[1].append(
                    (flow, variable)
                )
        if not grouping.shared(ref.node):
            for variable, size in sizes.items():
                add(found, variable, model.costs.count(op) * size)
        elif op.again.dropped and sizes:
            _add_replayed(found, model, flow, sizes)
    for (source, _), (size, readers) in alike.items():
        if grouping.shared(model.problem.ops[source].node):
            add(found, _outside(model, readers), size)
    return found


def _add_replayed(found: Expression, model: Model, flow: Flow, sizes: dict[int, int]) -> None:
    """What an op leaves in the blocks in which it is in a segment."""
    many = replays(model, flow, [np.array([one]) for one in sizes], model.problem.ops[flow.use.op].again.dropped)
    for variable, size in zip(many.tolist(), sizes.values(), strict=True):
        add(found, variable, size)


def _outside(model: Model, readers: Sequence[tuple[Flow, int]]) -> int:
    """A variable that is 1 where any of some ops reads so in a block in which it is in no segment."""
    found = model.program.variable("outside", whole=False)
    for flow, variable in readers:
        op, terms, right = model.problem.ops[flow.use.op], [(found, 1.0), (variable, -1.0)], 0.0
        if op.again.dropped:
            terms, right = [*terms, (model.kept(op.stage, op.again.dropped), -1.0)], -1.0
        model.program.at_least("outside", terms, right)
    return found
