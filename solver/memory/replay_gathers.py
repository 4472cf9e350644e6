"""Gathers of parameters by replays: a replay gathers what it reads, even where the plan keeps the gathered copy.

q tells whether any block of the stage recomputes the op that reads the parameter, and F are those flows of the
parameter to the op for which the same bytes move (`TransferBytes`)::

    again >= sum of F + q - 1

Where `again` is 1, as much moves in the backward of the stage's blocks as for a parameter that is gathered again; only
the gathered copies are left out, since they count with the ops that keep them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.transfer_bytes import TransferBytes, replay_transfer_bytes
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Flow


def replay_gathers(
    model: Model,
    flows: Mapping[tuple[int, int], Sequence[Flow]],
    read_alike: dict[int, Hashable],
    grouping: Grouping,
) -> dict[int, list[list[tuple[TransferBytes, int]]]]:
    """By stage and read, what moves for parameters in replays, each with the variable that says whether it does;
    buckets are those of `grouping`.

    Variables of parameters that several regions read are added to `read_alike`: equal if they read one parameter alike.
    """
    problem, program, found = model.problem, model.program, dict[int, list[list[tuple[TransferBytes, int]]]]()
    for (source, reader), some in flows.items():
        op = problem.ops[reader]
        if not op.again.dropped or not problem.memory.is_parameter(problem.ops[source].node):
            continue
        whether = model.any_recomputed[op.stage][op.again.dropped - 1]
        for flow in some:
            read = list[tuple[TransferBytes, int]]()
            for one, alike in _alike(model, flow, grouping).items():
                again = program.variable("again", whole=False)
                program.at_least("again", [(again, 1.0), (whether, -1.0), *((v, -1.0) for v in alike)], -1.0)
                if problem.grouping.shared(problem.ops[source].node):
                    pairs = {v: pair for pair, v in flow.pairs.items()}
                    read_alike[again] = source, tuple(pairs[v] for v in alike)
                read.append((one, again))
            if read:
                found.setdefault(op.stage, []).append(read)
    return found


def _alike(model: Model, flow: Flow, grouping: Grouping) -> dict[TransferBytes, list[int]]:
    """The flows that keep the gathered copy, grouped by what moves in backward for a replay."""
    problem, ref, found = model.problem, model.problem.ref(flow.tensor), dict[TransferBytes, list[int]]()
    for ((storage, regather), wanted), variable in flow.pairs.items():
        if not regather:  # else it is gathered in backward anyway
            one = replay_transfer_bytes(problem.memory, grouping, ref, storage, wanted)
            if one.arriving:
                found.setdefault(one, []).append(variable)
    return found
