"""The memory rows of one stage, for its blocks at each level of recompute; notation as in `solver.memory.rows`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.cost.memory.backward_transfers import Phase
from autopar.solver.memory.limits import limit_of, only_at
from autopar.solver.memory.stage_bytes import UNIT, StageBytes, add, total
from autopar.solver.memory.stage_transfers import PhaseSums, StageTransfers
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, counted

RowsOf = Callable[[str, Sequence[Sequence[int | None]], Expression, float], None]


class Living(NamedTuple):
    """Variables, in MiB, of what lives in a stage's backward.

    `fullest`: W by level; `behind`: the same of all blocks but the first; `next_one`: N by level; `last`: W of the last
    block where it is not recomputed; `there`: what lives throughout; `before`: what the stages before keep.
    """

    fullest: Sequence[Mapping[Phase, int | None]]
    behind: Sequence[Mapping[Phase, int | None]]
    next_one: Sequence[int | None]
    last: Mapping[Phase, int | None]
    there: Sequence[int | None]
    before: int | None


class Peaks:
    """Adds the memory rows of stages: `rows` adds them to the program, and `total` makes a variable of a sum."""

    def __init__(self, model: Model, transfers: StageTransfers, rows: RowsOf, total: Callable[..., int | None]) -> None:
        self.model, self.program, self.transfers = model, model.program, transfers
        self.rows, self.total = rows, total
        self.memory = model.problem.memory

    def add(self, number: int, stage_bytes: StageBytes, sums: Living) -> None:
        """Add the rows of a stage's backward: of its last block and the next to last where these are not recomputed,
        then of each level. Blocks that share buckets have rows of both cases of `solver.memory.division`."""
        if not self.transfers.division.of(number):
            self._add(number, stage_bytes, sums)
            return
        arriving, most_in_bucket = self.transfers.arriving(number), self.most_of_bucket(number)

        def unless_apart(name: str, sums: Sequence[Sequence[int | None]], terms: Expression, right: float) -> None:
            self.rows(
                name,
                [[*parts, arriving] for parts in sums],
                total(terms, {self.transfers.division.kept(number): most_in_bucket * UNIT}),
                right + most_in_bucket,
            )

        shared = Peaks(self.model, self.transfers, unless_apart, self.total)
        shared._add(number, stage_bytes, sums)
        Peaks(self.model, self.transfers.apart(), self.rows, self.total)._add_whole(number, stage_bytes, sums)

    def _add_whole(self, number: int, stage_bytes: StageBytes, sums: Living) -> None:
        """Add the rows for the case that all blocks of a stage are recomputed as a whole."""
        stage, blocks = self.model.problem.stages[number], self.transfers.blocks(number)
        w, there, before = sums.fullest[0], sums.there, sums.before
        if stage.count == 1:
            self._cases(f"backward of stage {number}, apart", [*there, before], w, blocks, stage_bytes.kept.inputs)
            return
        self._last_of_level(number, stage_bytes, stage.depth, w, (), there, before)
        self._first_of_level(number, stage_bytes, stage.depth, w, there, before, blocks)

    def _add(self, number: int, stage_bytes: StageBytes, sums: Living) -> None:
        """Add the rows of all levels, for the case that not all blocks that share buckets are recomputed whole."""
        fullest, behind, next_one, last, there, before = sums
        stage, name = self.model.problem.stages[number], f"backward of stage {number}"
        m, blocks = stage.count, self.transfers.blocks(number, divided=not self.transfers.dividing(number))
        if m == 1:
            self._cases(
                name,
                [*there, before],
                fullest[0],
                self.transfers.blocks(number, divided=False),
                stage_bytes.kept.inputs,
            )
            self._divided(f"{name}, divided", number, [*there, before], fullest[0], stage_bytes.kept.inputs)
            return
        kept, together = self._all_but_one(stage_bytes, 0, before), [self.transfers.last_block(number, divided=False)]
        self._cases(f"{name}, last block", [*there, kept], last, together, {})
        if m > 2:
            inner = self.transfers.blocks(number, divided=False, but_first=True)
            self._cases(
                f"{name}, next to last block", [*there, before], behind[0], inner, self._next_to_last(stage_bytes)
            )
        for level in range(stage.depth + 1):
            whole = bool(level and level == stage.depth)
            w, w_behind = (fullest[0], fullest[0]) if whole else (fullest[level], behind[level])
            if level and (stage.depth > 1 or whole):
                self._last_of_level(number, stage_bytes, level, w_behind, next_one, there, before)
            if stage.depth > 1 or not level:
                self._first_of_level(number, stage_bytes, level, w, there, before, blocks)

    def _last_of_level(
        self,
        number: int,
        stage_bytes: StageBytes,
        level: int,
        w: Mapping[Phase, int | None],
        next_one: Sequence[int | None],
        there: Sequence[int | None],
        before: int | None,
    ) -> None:
        """Add the rows of the last block of a level of recompute, and of the next block, which is of a lower level."""
        stage, here = self.model.problem.stages[number], f"backward of stage {number}, level {level}"
        m, whole = stage.count, level == stage.depth
        counts, whether = self.model.recomputed.get(number, []), self.model.any_recomputed.get(number, [])
        limit = limit_of(self.model, stage) if stage.depth > 1 else 0.0
        gradients = self._gradients_of_others(stage_bytes, m)
        terms = self._gradients_behind(stage_bytes, gradients, counts[level - 1], whether[level - 1], m)
        kept = before if whole else self._all_but_one(stage_bytes, level, before)
        alone = {whether[-1]: limit * UNIT} if whole and limit else {}
        for variable, size in (*(stage_bytes.kept.inputs.items() if whole else ()), *alone.items()):
            add(terms, variable, size)
        less = {} if whole else self._less_behind_last(stage_bytes, number, level)
        gradients_of_last = {} if self.memory.micro_batches > 1 else stage_bytes.gradients.of_block
        behind_it = total(terms, {v: -c for v, c in gradients_of_last.items()})
        for at_end, after_others, switch, more in self._of_level(number, whether[level - 1]):
            right = (limit if alone else 0.0) + more
            self._cases(here, [*there, kept], w, at_end, total(terms, switch), right)
            self._cases(here, [*there, kept], w, after_others, total({**terms, **less}, switch), right)
            if not whole:
                n = {Phase.REDUCING: next_one[level]}
                self._cases(f"{here}, behind it", [*there, kept], n, at_end, total(behind_it, switch), more)
                lesser = total(total(behind_it, less), switch)
                self._cases(f"{here}, behind it", [*there, kept], n, after_others, lesser, more)

    def _first_of_level(
        self,
        number: int,
        stage_bytes: StageBytes,
        level: int,
        w: Mapping[Phase, int | None],
        there: Sequence[int | None],
        before: int | None,
        blocks: Sequence[PhaseSums],
    ) -> None:
        """Add the rows of a stage's first block, if it is of this level: the gradients of all other blocks are there.
        `blocks`: the cases of what is in flight after a block."""
        stage, here = self.model.problem.stages[number], f"backward of stage {number}, first block"
        whole = bool(level and level == stage.depth)
        limit = limit_of(self.model, stage) if stage.depth > 1 else 0.0
        off, right = only_at(self.model.any_recomputed.get(number, []), level, limit)
        # 0 where the block is not recomputed
        inputs = stage_bytes.kept.first_inputs if whole or stage.depth == 1 else {}
        terms = {**self._gradients_of_others(stage_bytes, stage.count), **inputs, **off}
        self._cases(here, [*there, before], w, blocks, terms, right)
        self._divided(f"{here}, divided", number, [*there, before], w, terms, right)

    def add_forward(
        self,
        number: int,
        stage_bytes: StageBytes,
        fullest: Sequence[int | None],
        there: Sequence[int | None],
        before: int | None,
        beside: Expression,
        more: float = 0.0,
        *,
        behind: bool,
    ) -> None:
        """Add rows of a stage's forward, from W of each level: of the first block or, with `behind`, of later blocks,
        each taken for the last of its level. `beside`: further terms; `more`: what these add to the right side."""
        stage, name = self.model.problem.stages[number], f"forward of stage {number}"
        if stage.count == 1:
            self.rows(name, [[*there, before, fullest[0]]], total(beside, stage_bytes.kept.inputs), more)
            return
        whether, limit = (
            self.model.any_recomputed.get(number, []),
            limit_of(self.model, stage) if stage.depth > 1 else 0.0,
        )
        for level in range(stage.depth + 1):
            whole, terms, right = bool(level and level == stage.depth), beside, 0.0
            if not behind:
                off, right = only_at(whether, level, limit)
                terms = total(total(terms, stage_bytes.kept.first_inputs if whole or stage.depth == 1 else {}), off)
            elif whole:
                right = limit
                terms = total(total(terms, stage_bytes.kept.inputs), {whether[-1]: limit * UNIT} if limit else {})
            kept = before if not behind or whole else self._all_but_one(stage_bytes, level, before)
            if stage.depth > 1 or not level or (whole and behind):
                self.rows(name, [[*there, kept, fullest[0 if whole else level]]], terms, right + more)

    def _cases(
        self,
        name: str,
        parts: Sequence[int | None],
        fullest: Mapping[Phase, int | None],
        cases: Sequence[PhaseSums],
        terms: Expression,
        right: float = 0.0,
    ) -> None:
        both = [(phase, sums) for case in cases for phase, sums in case.items() if phase in fullest]
        rows = [[*parts, fullest[phase], *sums] for phase, sums in both]
        self.rows(name, rows, terms, right)

    def _divided(
        self,
        name: str,
        number: int,
        parts: Sequence[int | None],
        fullest: Mapping[Phase, int | None],
        terms: Expression,
        right: float = 0.0,
    ) -> None:
        """Add rows of blocks that are not the first of their bucket: they reduce only where recompute divides it."""
        stages = self.transfers.dividing(number)
        limit = self._limit_of_bucket(number) if stages else 0.0
        for stage in stages:
            if_so = total(terms, {self.model.any_recomputed[stage][0]: limit * UNIT})
            only = {Phase.REDUCING: fullest[Phase.REDUCING]}
            self._cases(name, parts, only, self.transfers.blocks(number), if_so, right + limit)

    def _of_level(self, number: int, q: int) -> Iterator[tuple[list[PhaseSums], list[PhaseSums], Expression, float]]:
        """Yield the cases of what is in flight after a stage's last block and after its other blocks, with terms and a
        right side that switch their rows off: where no block of the stage is the first of a bucket, buckets are reduced
        only if recompute divides them, for which a block must be of the level (`q` is 1)."""
        apart = bool(self.transfers.dividing(number))
        after_last = self.transfers.last_block(number, divided=not apart)
        after_others = self.transfers.blocks(number, divided=not apart)
        yield [after_last], [case for case in after_others if case != after_last], {}, 0.0
        if apart:
            at_end, after_others = map(_reducing, ([self.transfers.last_block(number)], self.transfers.blocks(number)))
            limit = self._limit_of_bucket(number)
            yield at_end, [case for case in after_others if case not in at_end], {q: limit * UNIT}, limit

    def most_of_bucket(self, number: int) -> float:
        """A big M, in MiB, for rows that count a stage's shared buckets: added to the right side, it disables them."""
        return self._limit_of_bucket(number) + limit_of(self.model, self.model.problem.stages[number])

    def _limit_of_bucket(self, number: int) -> float:
        """An upper bound, in MiB, on all that is there when a bucket of a stage is reduced: a big M."""
        reducing = self.transfers.reducing(number).items()
        return sum(limit_of(self.model, self.model.problem.stages[owner]) * blocks for owner, blocks in reducing)

    def _all_but_one(self, stage_bytes: StageBytes, level: int, before: int | None) -> int | None:
        """What the stages before keep, and all blocks of a level or higher but the last of them. Where no block is of
        such a level, the blocks' part is negative."""
        return self.total("held", stage_bytes.kept.but_last[level], before, lower=-math.inf)

    def _next_to_last(self, stage_bytes: StageBytes) -> Expression:
        """What all blocks but the last two keep, with the gradients of the last."""
        terms = dict(stage_bytes.kept.but_last_two)
        for variable, size in ({} if self.memory.micro_batches > 1 else stage_bytes.gradients.of_block).items():
            add(terms, variable, size)
        return terms

    def _gradients_of_others(self, stage_bytes: StageBytes, m: int) -> Expression:
        """(m - 1) G; with several micro-batches nothing, since gradients then count as accumulated throughout."""
        of_block = {} if self.memory.micro_batches > 1 else stage_bytes.gradients.of_block
        return {variable: (m - 1) * size for variable, size in of_block.items()}

    def _gradients_behind(self, stage_bytes: StageBytes, gradients: Expression, r: int, q: int, m: int) -> Expression:
        """(m - r) G, but (m - 1) G where r is 0: gradients of the blocks after the first r."""
        terms = dict(gradients)
        for choices, sizes in stage_bytes.gradients.by_parameter if gradients else ():
            by_size: dict[float, list[int]] = {}
            for variable in choices.tolist():
                by_size.setdefault(sizes.get(variable, 0.0), []).append(variable)
            groups = [np.array(variables) for variables in by_size.values()]
            variables = counted(self.program, groups, {r: 1.0, q: -1.0}, m - 1)
            for variable, size in zip(variables.tolist(), by_size, strict=True):
                add(terms, variable, -size)
        return terms

    def _less_behind_last(self, stage_bytes: StageBytes, number: int, level: int) -> Expression:
        """D of a level: where all blocks are of this level, by how much the block before the last has less."""
        if not stage_bytes.gradients.most_left_behind:
            return {}
        accumulates = self.memory.micro_batches > 1
        most_less = stage_bytes.gradients.most_left_behind / UNIT
        gradients = stage_bytes.gradients
        limit = 0.0 if accumulates else sum(max(sizes.values()) for _, sizes in gradients.by_parameter) / UNIT
        kept, less = self.model.kept(number, level), self.program.variable("less", upper=most_less, whole=False)
        self.program.at_most("less", [(less, 1.0), (kept, most_less)], most_less)
        terms = {v: -c for v, c in stage_bytes.kept.least_by_level[level].items()}
        for variable, size in ({} if accumulates else stage_bytes.gradients.of_block).items():
            add(terms, variable, size)
        bytes_ = [(v, c / UNIT) for v, c in terms.items()]
        self.program.at_most("less", [(less, 1.0), (kept, -limit), *bytes_], 0.0)
        return {less: -UNIT}


def _reducing(cases: Sequence[PhaseSums]) -> list[PhaseSums]:
    return [{phase: sums for phase, sums in case.items() if phase is Phase.REDUCING} for case in cases]
