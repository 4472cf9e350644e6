"""Memory rows of a training step's forward, for the regions where it may hold the peak (`cost.memory.forward_part`).

K(v) is what a block's ops up to v keep (`solver.memory.rows`); what else is there at v, with parameters in flight,
is that of `solver.memory.forward_rows`::

    W_0 >= K(v) + alive(v) + copies(v) + moving(v)          W_l: as in backward
    first block:           always + H(before)             + W_l <= budget
    last block of level l: always + H(before) + H_l - F_l + W_l <= budget

What is kept grows from block to block, and there are no gradients yet: of the blocks after the first, the last of each
level has the most, so each of them is stated as if it were that one. Copies of parameters that are kept count in W from
their arrival on, and so not in K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost.memory.backward_transfers import Phase
from autopar.cost.memory.forward_part import ForwardPart
from autopar.solver.memory.forward_rows import ForwardRows
from autopar.solver.memory.peaks import Peaks
from autopar.solver.memory.points import Pieces, Points
from autopar.solver.memory.stage_bytes import UNIT, StageBytes, add, total
from autopar.solver.memory.sums import Sums
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Flow

_BLOCK = Phase.SINCE  # the one phase of all points here: what is in flight is already among their bytes


class ForwardPeaks:
    """Adds the forward rows of a model's stages by `peaks`; `flows` as in `ForwardRows`."""

    def __init__(
        self,
        model: Model,
        flows: Mapping[tuple[int, int], list[Flow]],
        points: Points,
        peaks: Peaks,
        sums: Sums,
        part: ForwardPart,
    ) -> None:
        self.model, self.problem, self.points, self.peaks, self.sums = model, model.problem, points, peaks, sums
        self.part, self.grouping = part, part.grouping
        self.rows = ForwardRows(model, flows, points, sums.bucket, part.memory, part.grouping)

    def add(self, number: int, stage_bytes: StageBytes, there: Sequence[int | None], before: int | None) -> None:
        """Add the rows of a stage. `there`: variables of what lives throughout; `before`: of what stages before
        keep."""
        stage = self.problem.stages[number]
        begins, grown = self.points.begins(stage), dict[bool, dict[int, tuple[Expression, Expression]]]()
        pieces: dict[bool, Pieces] = {}

        def note(block: int, member: int, phase: Phase, terms: Expression) -> None:
            behind = block > 0
            if behind not in grown:
                grown[behind] = self._growth(number, stage_bytes, behind=behind)
            kept = grown[behind][member][phase is not Phase.LANDING]
            row = total(kept, terms), 0.0, float("inf")
            pieces.setdefault(behind, {}).setdefault((_BLOCK, begins[member]), []).append(row)

        self.rows.stage(number, note, self.part.regions, self.part.landings)
        later, off = self._returned_later(number) if pieces else {}, 0.0
        if self.part.landings and not self._always_counts(number):
            off = self.peaks.most_of_bucket(number)
            later = total(later, {self.peaks.transfers.division.kept(number): off * UNIT})
        for behind, pieces_of_kind in pieces.items():
            levels = self.points.by_level(number, pieces_of_kind, self.sums.largest)
            fullest = [by_phase[_BLOCK] for by_phase in levels]
            self.peaks.add_forward(number, stage_bytes, fullest, there, before, later, off, behind=behind)

    def _always_counts(self, number: int) -> bool:
        """Whether a stage's rows hold even where all blocks that share its buckets are recomputed as a whole."""
        first, count = self.problem.first_region[number], self.problem.stages[number].count
        any_in_part = not self.part.regions.isdisjoint(range(first, first + count))
        return any_in_part or not self.peaks.transfers.division.of(number)

    def _growth(
        self, number: int, stage_bytes: StageBytes, *, behind: bool
    ) -> dict[int, tuple[Expression, Expression]]:
        """By op: what a block keeps before the op runs and once it has run, parameters apart."""
        current = dict(stage_bytes.block.brought.get(-1, {})) if behind else {}
        kept_by_op: dict[int, tuple[Expression, Expression]] = {}
        for member in self.problem.stages[number].ops:
            before = current
            for change in (
                stage_bytes.block.by_op.get(member, {}),
                stage_bytes.block.brought.get(member, {}) if behind else {},
            ):
                current = self.points.chain(current, change) if change else current
            kept_by_op[member] = before, current
        return kept_by_op

    def _returned_later(self, number: int) -> Expression:
        """Outputs that count always though later stages make them: with a minus sign, to be taken off here."""
        memory, returned = self.problem.memory, dict[int, float]()
        last = self.problem.first_region[number] + self.problem.stages[number].count - 1
        for output, op in enumerate(self.problem.ops):
            for variable, choice in (
                zip(self.model.x[output], op.choices, strict=True) if op.node.op == "output" else ()
            ):
                for copy, size in memory.savings.held_copies(op.node, choice.strategy).items():
                    if not memory.is_kept(copy[0]) and self.grouping.region(copy[0].node) > last:
                        add(returned, variable, -size)
        return returned
