"""Outputs that recomputed segments make again while the caller holds the first ones, as in `cost.memory.returned`.

Take a storage of R bytes that segments make from some level on, and that ops of the block keep at the levels below e.
A block of level e or higher holds R beside what it keeps; one recomputed as a whole also does so in its own turn,
beside its replay. r_l blocks recompute at level l or a higher one::

    all blocks                        R r_e
    all but the last of level l       R r_e if l < e, else R (r_l - 1)

While an inner segment that makes the storage is replayed, R is there beside it. All such tensors of a stage with the
same e are counted as one, as their sizes depend on one choice, that of the graph's output.
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
    """Add these bytes to a model's stages. `kept`: as in `solver.memory.returned.Returned`; `copies`: what ops keep."""
    problem, by_level = model.problem, dict[tuple[int, int], Expression]()
    for root, sizes in (
        (kept_tensor.root, kept_tensor.sizes) for kept_by_block in kept.values() for kept_tensor in kept_by_block
    ):
        op = problem.ops[problem.op_of[root.node]]
        levels, dropped, depth = problem.stages[op.stage].levels, op.again.dropped, problem.stages[op.stage].depth
        if levels is None or not dropped:
            continue
        for level in range(dropped, depth):
            span = levels.holding(op.again.offset, level)
            assert span is not None
            block = stages[op.stage].block
            for by_segment in (block.besides, block.freed):  # it is there from the segment's begin to its end
                for variable, size in sizes.items():
                    add(by_segment.setdefault((level, span), {}), variable, size)
        savers = _savers(copies, problem.memory, root)
        until = [saver.end for saver in savers if problem.ops[saver.op].stage == op.stage]
        total = by_level.setdefault((op.stage, max([dropped, *until])), {})
        for variable, size in sizes.items():
            total[variable] = total.get(variable, 0.0) + size
    for (number, level), sizes in by_level.items():
        _hold(model, number, stages[number], level, sizes)


def _savers(copies: Copies, memory: StepMemory, root: TensorRef) -> list[Saver]:
    """The ops that keep a storage, however it is cut."""
    own = (savers for (_, (kept_root, _)), savers in copies.own.items() if kept_root == root)
    shared = (savers for (kept_root, _), savers in copies.shared.items() if kept_root == root)
    return [saver for copies_of_kind in (own, shared) for savers in copies_of_kind for saver in savers.values()]


def _hold(model: Model, number: int, stage_bytes: StageBytes, level: int, sizes: Expression) -> None:
    """Add what the caller holds of a stage's blocks of at least a level (e above); `sizes`: bytes by choice."""
    stage = model.problem.stages[number]
    by_size: dict[float, list[int]] = {}
    for variable, size in sizes.items():
        by_size.setdefault(size, []).append(variable)

    def times(count: int, most: int) -> Expression:
        variables = counted(model.program, list(by_size.values()), {count: 1.0}, most).tolist()
        return dict(zip(variables, by_size, strict=True))

    recomputed = model.recomputed[number]
    held_at = {of_level: times(recomputed[of_level - 1], stage.count) for of_level in range(level, stage.depth + 1)}
    for target in (stage_bytes.kept.all_blocks, stage_bytes.kept.but_last_two, *stage_bytes.kept.but_last[:level]):
        _put(target, held_at[level])
    for of_level in range(level, len(stage_bytes.kept.but_last)):
        _put(stage_bytes.kept.but_last[of_level], held_at[of_level])
        _put(stage_bytes.kept.but_last[of_level], sizes, -1.0)
    _put(stage_bytes.kept.inputs, held_at[stage.depth])
    first = held_at[stage.depth] if stage.count == 1 else times(model.any_recomputed[number][-1], 1)
    _put(stage_bytes.kept.first_inputs, first)


def _put(target: Expression, terms: Expression, sign: float = 1.0) -> None:
    for variable, size in terms.items():
        add(target, variable, sign * size)
