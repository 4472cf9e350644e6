"""What the caller holds of outputs that recomputed segments make, as `cost.memory.returned` has it.

Of a storage of R bytes that segments make from a level on, and that ops of the block keep until level e, a block of at
least level e keeps R besides, and so do the last level's blocks in their own turn, beside their replays::

    all blocks           R r_e        (r_l, how many blocks recompute at level l or a higher one)
    all but the last of level l       R r_e where l is below e, else R (r_l - 1)

While an inner segment is replayed that makes it, R is there besides. All such tensors of a stage that are kept until
the same level count as one: their sizes depend on one choice, of the graph's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost.memory.formulas import StepMemory
from autopar.graph import TensorRef
from autopar.solver.memory.returned import Kept
from autopar.solver.memory.savers import Copies, Saver
from autopar.solver.memory.stage_bytes import StageBytes, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, counted


def returned_again(
    model: Model, stages: Sequence[StageBytes], copies: Copies, kept: Mapping[int, Sequence[Kept]]
) -> None:
    """Adds to a model's stages. `kept`: `solver.memory.returned.Returned.kept`; `copies`: what ops keep."""
    problem, by_level = model.problem, dict[tuple[int, int], Expression]()
    for root, sizes in ((one.root, one.sizes) for some in kept.values() for one in some):
        op = problem.ops[problem.op_of[root.node]]
        levels, dropped, depth = problem.stages[op.stage].levels, op.again.dropped, problem.stages[op.stage].depth
        if levels is None or not dropped:
            continue
        for level in range(dropped, depth):
            span = levels.holding(op.again.offset, level)
            assert span is not None
            for part in (stages[op.stage].besides, stages[op.stage].freed):  # from where it begins to where it ends
                for variable, size in sizes.items():
                    add(part.setdefault((level, span), {}), variable, size)
        until = [
            saver.end for saver in _savers(copies, problem.memory, root) if problem.ops[saver.op].stage == op.stage
        ]
        total = by_level.setdefault((op.stage, max([dropped, *until])), {})
        for variable, size in sizes.items():
            total[variable] = total.get(variable, 0.0) + size
    for (number, level), sizes in by_level.items():
        _hold(model, number, stages[number], level, sizes)


def _savers(copies: Copies, memory: StepMemory, root: TensorRef) -> list[Saver]:
    """The ops that keep a storage, however it is cut."""
    own = (savers for (_, (its, _)), savers in copies.own.items() if its == root)
    shared = (savers for (its, _), savers in copies.shared.items() if its == root)
    return [saver for some in (own, shared) for savers in some for saver in savers.values()]


def _hold(model: Model, number: int, data: StageBytes, level: int, sizes: Expression) -> None:
    """What blocks of a stage hold of such tensors that are kept otherwise until a level; `sizes`: of all choices."""
    stage = model.problem.stages[number]
    by_size: dict[float, list[int]] = {}
    for variable, size in sizes.items():
        by_size.setdefault(size, []).append(variable)

    def times(count: int, most: int) -> Expression:
        variables = counted(model.program, list(by_size.values()), {count: 1.0}, most).tolist()
        return dict(zip(variables, by_size, strict=True))

    recomputed = model.recomputed[number]
    held = {one: times(recomputed[one - 1], stage.count) for one in range(level, stage.depth + 1)}
    for target in (data.held, data.held_but_two, *data.held_but_one[:level]):
        _put(target, held[level])
    for one in range(level, len(data.held_but_one)):
        _put(data.held_but_one[one], held[one])
        _put(data.held_but_one[one], sizes, -1.0)
    _put(data.inputs, held[stage.depth])
    first = held[stage.depth] if stage.count == 1 else times(model.any_recomputed[number][-1], 1)
    _put(data.first_inputs, first)


def _put(target: Expression, terms: Expression, sign: float = 1.0) -> None:
    for variable, size in terms.items():
        add(target, variable, sign * size)
