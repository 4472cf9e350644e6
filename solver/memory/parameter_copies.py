"""Copies of parameters in the dtype and layout in which ops keep them, unless they are gathered again.

Each block has its own, which count like its activations (`solver.memory.saved`), until the level of recompute from
which on their op is in a segment. What several ops of a region keep in one layout is one copy there, and one more in
every other region: each gathers what it reads. Rows have it so where the region is not recomputed; of a block that may
be, they count one for each op::

    s_v >= f[v], s_v >= s_u      as far as op v, of those that keep it; u before v; f: the flows to v in this layout
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost.memory.cuts import Cuts
from autopar.solver.memory.stage_bytes import StageBytes, add, keep
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Flow, replays

Copies = dict[int, int]  # flows with the bytes of what is kept where they are 1


def add_parameter_copies(model: Model, stages: Sequence[StageBytes]) -> None:
    """Add what the ops of a model keep of parameters to its stages."""
    problem, kept = model.problem, [(flow, copies) for flow in model.flows if (copies := _kept(model, flow))]
    alike: dict[tuple[int, Cuts, int], list[tuple[Flow, Copies]]] = {}
    for flow, copies in kept:
        region = problem.grouping.region(problem.ops[flow.use.op].node)
        for (_, wanted), variable in flow.pairs.items():
            if variable in copies:
                found = alike.setdefault((flow.tensor.source, problem.memory.cuts(wanted), region), [])
                if not found or found[-1][0] is not flow:
                    found.append((flow, {}))
                found[-1][1][variable] = copies[variable]
    shared: set[int] = set()  # the flows of copies that several ops keep
    for found in alike.values():
        ops = [problem.ops[flow.use.op] for flow, _ in found]
        if len(found) > 1 and problem.stages[ops[0].stage].count == 1 and not any(op.again.dropped for op in ops):
            _add_one_copy(model, stages[ops[0].stage], found)
            shared.update(variable for _, copies in found for variable in copies)
    for flow, copies in kept:
        own = {variable: size for variable, size in copies.items() if variable not in shared}
        if own:
            _add_own_copies(model, stages[problem.ops[flow.use.op].stage], flow, own)


def _kept(model: Model, flow: Flow) -> Copies:
    """What an op keeps of a parameter."""
    problem, memory = model.problem, model.problem.memory
    node = problem.ops[flow.tensor.source].node
    if not memory.is_parameter(node) or flow.use.index not in memory.saved(problem.ops[flow.use.op].node)[0]:
        return {}
    found = {}
    for ((storage, regather), wanted), variable in flow.pairs.items():
        size = 0 if regather else memory.read_bytes(node, storage, wanted)
        if size:
            found[variable] = size
    return found


def _add_one_copy(model: Model, data: StageBytes, found: Sequence[tuple[Flow, Copies]]) -> None:
    """A copy that several ops of a region keep."""
    program, so_far = model.program, -1
    size = max(size for _, copies in found for size in copies.values())
    for flow, copies in sorted(found, key=lambda one: one[0].use.op):
        one = program.variable("saved", whole=False)
        program.at_least("saved", [(one, 1.0), *((variable, -1.0) for variable in copies)], 0.0)
        keep(data.parameters, flow.use.op, one, size)
        if so_far >= 0:
            program.at_least("saved", [(one, 1.0), (so_far, -1.0)], 0.0)
            keep(data.parameters, flow.use.op, so_far, -size)
        so_far = one
    add(data.held, so_far, size)


def _add_own_copies(model: Model, data: StageBytes, flow: Flow, sizes: Copies) -> None:
    """Copies for this op alone."""
    op = model.problem.ops[flow.use.op]
    count, dropped = model.costs.count(op), op.again.dropped
    for variable, size in sizes.items():
        keep(data.parameters, flow.use.op, variable, size)
    groups = [np.array([variable]) for variable in sizes]
    again = {
        level: dict(zip(sizes, replays(model, flow, groups, level).tolist(), strict=True))
        for level in {*range(1, min(dropped, len(data.least))), dropped} - {0}
    }
    for targets, left_out in (([data.held], 0), (data.held_but_one, 1), ([data.held_but_two], 2)):
        for level, target in enumerate(targets[: dropped or None]):
            for variable, size in sizes.items():
                if level:
                    add(target, again[level][variable], size)
                    add(target, variable, -left_out * size)
                else:
                    add(target, variable, (count - left_out) * size)
                if dropped:
                    add(target, again[dropped][variable], -size)
    for target in data.least[: dropped or None]:
        for variable, size in sizes.items():
            add(target, variable, size)
    levels = model.problem.stages[op.stage].levels
    if levels is None or not dropped:
        return
    for level in range(dropped, len(levels)):
        span = levels.holding(op.again.offset, level)
        assert span is not None
        for variable, size in sizes.items():
            add(data.freed.setdefault((level, span), {}), variable, size)
