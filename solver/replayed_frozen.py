"""Frozen parameters that replays read: these gather them, also where the plan does not gather them again.

For each flow f of such a parameter to an op that blocks recompute at some level, where q tells if any does::

    again >= f + q - 1

Where it is 1, what moves for the parameter in the backward of the stage's blocks is what does for one that is gathered
again. It is more than there is: what a block keeps of it as far as an op counts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost.moving import Moving, moving
from autopar.solver.model import Model
from autopar.solver.replays import Flow


def frozen_again(
    model: Model, flows: Mapping[tuple[int, int], Sequence[Flow]]
) -> dict[int, list[list[tuple[Moving, int]]]]:
    """By stage, what moves for frozen parameters in replays, by read, with the variables that say whether it does."""
    problem, found = model.problem, dict[int, list[list[tuple[Moving, int]]]]()
    for (source, reader), some in flows.items():
        op, parameter = problem.ops[reader], problem.ops[source].node
        if not op.again.dropped or not problem.memory.is_frozen(parameter):
            continue
        whether = model.any_recomputed[op.stage][op.again.dropped - 1]
        for flow in some:
            ref, read = problem.ref(flow.tensor), list[tuple[Moving, int]]()
            for ((storage, regather), wanted), variable in flow.pairs.items():
                if regather:  # among what moves in backward anyway
                    continue
                one = moving(problem.memory, problem.grouping, ref, storage, wanted, regather=True)
                if one.gathered:
                    again = model.program.variable("again", whole=False)
                    ends = [(again, 1.0), (variable, -1.0), (whether, -1.0)]
                    model.program.at_least("again", ends, -1.0)
                    read.append((one, again))
            if read:
                found.setdefault(op.stage, []).append(read)
    return found
