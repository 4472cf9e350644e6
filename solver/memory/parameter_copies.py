"""Gathered or cast copies of parameters that ops keep for backward (those that are gathered again are not kept).

Each block has its own copies, which count like its saved tensors (`solver.memory.saved`) at the levels of recompute
below the one from which on their op is in a segment. Several ops of a region that keep a parameter in one layout share
a copy; each region that reads the parameter gathers it, and so has a copy of its own. Rows count a shared copy once
only if the region cannot be recomputed; in a block that may be, they count one for each op::

    s_v >= f[v], s_v >= s_u      s_v: kept up to op v; u: the op before v that keeps it; f: flows to v in this layout
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost.memory.cuts import Cuts
from autopar.solver.memory.stage_bytes import StageBytes, add, keep
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Flow, replays

Copies = dict[int, int]  # by a flow's variable: bytes that are kept if it is 1


def add_parameter_copies(model: Model, stages: Sequence[StageBytes]) -> None:
    """Add the copies of parameters that the ops of a model keep to its stages."""
    problem, kept = model.problem, [(flow, copies) for flow in model.flows if (copies := _kept(model, flow))]
    alike: dict[tuple[int, Cuts, int], list[tuple[Flow, Copies]]] = {}
    for flow, copies in kept:
        region = problem.grouping.region(problem.ops[flow.use.op].node)
        for (_, wanted), variable in flow.pairs.items():
            if variable in copies:
                readers = alike.setdefault((flow.tensor.source, problem.memory.cuts(wanted), region), [])
                if not readers or readers[-1][0] is not flow:
                    readers.append((flow, {}))
                readers[-1][1][variable] = copies[variable]
    shared: set[int] = set()  # variables of flows to copies that several ops share
    for readers in alike.values():
        ops = [problem.ops[flow.use.op] for flow, _ in readers]
        if len(readers) > 1 and problem.stages[ops[0].stage].count == 1 and not any(op.again.dropped for op in ops):
            _add_one_copy(model, stages[ops[0].stage], readers)
            shared.update(variable for _, copies in readers for variable in copies)
    for flow, copies in kept:
        own = {variable: size for variable, size in copies.items() if variable not in shared}
        if own:
            _add_own_copies(model, stages[problem.ops[flow.use.op].stage], flow, own)


def _kept(model: Model, flow: Flow) -> Copies:
    """The copies of a parameter that an op keeps."""
    problem, memory = model.problem, model.problem.memory
    node = problem.ops[flow.tensor.source].node
    if not memory.is_parameter(node) or flow.use.index not in memory.saved(problem.ops[flow.use.op].node)[0]:
        return {}
    sizes = {}
    for ((storage, regather), wanted), variable in flow.pairs.items():
        size = 0 if regather else memory.read_bytes(node, storage, wanted)
        if size:
            sizes[variable] = size
    return sizes


def _add_one_copy(model: Model, stage_bytes: StageBytes, readers: Sequence[tuple[Flow, Copies]]) -> None:
    """Add a copy that several ops of a region share."""
    program, so_far = model.program, -1
    size = max(size for _, copies in readers for size in copies.values())
    for flow, copies in sorted(readers, key=lambda kept_by_now: kept_by_now[0].use.op):
        kept_by_now = program.variable("saved", whole=False)
        program.at_least("saved", [(kept_by_now, 1.0), *((variable, -1.0) for variable in copies)], 0.0)
        keep(stage_bytes.block.parameters_by_op, flow.use.op, kept_by_now, size)
        if so_far >= 0:
            program.at_least("saved", [(kept_by_now, 1.0), (so_far, -1.0)], 0.0)
            keep(stage_bytes.block.parameters_by_op, flow.use.op, so_far, -size)
        so_far = kept_by_now
    add(stage_bytes.kept.all_blocks, so_far, size)


def _add_own_copies(model: Model, stage_bytes: StageBytes, flow: Flow, sizes: Copies) -> None:
    """Add copies of this op alone."""
    op = model.problem.ops[flow.use.op]
    count, dropped = model.costs.count(op), op.again.dropped
    for variable, size in sizes.items():
        keep(stage_bytes.block.parameters_by_op, flow.use.op, variable, size)
    groups = [np.array([variable]) for variable in sizes]
    again = {
        level: dict(zip(sizes, replays(model, flow, groups, level).tolist(), strict=True))
        for level in {*range(1, min(dropped, len(stage_bytes.kept.least_by_level))), dropped} - {0}
    }
    for targets, left_out in (
        ([stage_bytes.kept.all_blocks], 0),
        (stage_bytes.kept.but_last, 1),
        ([stage_bytes.kept.but_last_two], 2),
    ):
        for level, target in enumerate(targets[: dropped or None]):
            for variable, size in sizes.items():
                if level:
                    add(target, again[level][variable], size)
                    add(target, variable, -left_out * size)
                else:
                    add(target, variable, (count - left_out) * size)
                if dropped:
                    add(target, again[dropped][variable], -size)
    for target in stage_bytes.kept.least_by_level[: dropped or None]:
        for variable, size in sizes.items():
            add(target, variable, size)
    levels = model.problem.stages[op.stage].levels
    if levels is None or not dropped:
        return
    for level in range(dropped, len(levels)):
        span = levels.holding(op.again.offset, level)
        assert span is not None
        for variable, size in sizes.items():
            add(stage_bytes.block.freed.setdefault((level, span), {}), variable, size)
