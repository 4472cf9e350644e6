"""Parameters and gradients in flight in the backward of each stage, as expressions that memory rows add up.

Where recompute may divide the bucket that a block shares with the next one, a variable D bounds what the next block's
part leaves behind. S is the part's bytes in the layouts chosen, and q tells whether any of the two blocks recomputes,
so that plans without recompute have D = 0::

    D >= S - most S * (1 - q)

A parameter that two stages read does not arrive again for one while the other's copy is there. E is what still arrives,
by the flows f that read the parameter in one layout::

    E >= f - sum of the flows of the other stage that read it alike

`apart` answers the same questions where all blocks that share buckets are recomputed as a whole, so that each has a
bucket of its own (`solver.memory.division`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.backward_transfers import (
    GATHER_FIELDS,
    Phase,
    Terms,
    backward_transfers,
    terms_beside_copies,
)
from autopar.cost.memory.transfer_bytes import TransferBytes
from autopar.solver.memory.division import Division
from autopar.solver.memory.stage_bytes import UNIT, BucketBytes

PhaseSums = Mapping[Phase, Sequence[int | None]]  # by phase, variables of what is in flight
Read = Sequence[tuple[TransferBytes, int]]  # a read of a parameter: what it transfers by each flow, with its variable
_DIVIDED = "divided"  # the field by which `backward_transfers` names D


class Reads(NamedTuple):
    """By stage, the reads of parameters that its ops keep for backward (`kept`), and of those whose gradients are
    `reduced` after its backward."""

    kept: Sequence[Sequence[Read]]
    reduced: Sequence[Sequence[Read]]


class StageTransfers:
    """Buckets in the backward of each stage: where blocks have `shared` ones, and where each has its `own`. `alike`:
    for flows of parameters that several regions read, a key that is equal for those that read one alike."""

    def __init__(
        self, shared: Reads, own: Reads, total: BucketBytes, division: Division, alike: Mapping[int, Hashable]
    ) -> None:
        model = division.model
        self.model, self.program, self.division = model, model.program, division
        self.grouping, self.stages = division.grouping, model.problem.stages
        self.first, self.stage_of = model.problem.first_region, model.problem.stage_of_region
        self._reads, self._total, self._alike = (shared, own), total, alike
        self._of_own = False
        self._sums: dict[tuple[str, int, int | None, bool], int | None] = {}
        self._seen: dict[tuple[str, int, int | None], int | None] = {}
        self._beside: dict[tuple[int, int, bool], Sequence[Read]] = {}
        self._left: dict[tuple[int, int], int | None] = {}

    def apart(self) -> StageTransfers:
        """The same for the case that all blocks that may have buckets of their own do."""
        of_own = copy.copy(self)
        of_own.grouping, of_own._of_own = self.division.divided, True
        return of_own

    def arriving(self, stage: int) -> int | None:
        """What may arrive of a recomputed block's own bucket, where not all blocks that share buckets are
        recomputed."""

        def own(owner: int) -> list[tuple[int | None, float]]:
            fields = "arriving", "begun"
            return [(self._sum(field, owner, None, own=True), self._most(field, owner, own=True)) for field in fields]

        return self.division.arriving(stage, own)

    def last_block(self, stage: int, *, divided: bool = True) -> PhaseSums:
        """What is in flight in each phase of the backward of a stage's last block. `divided`: count the reductions
        that follow if recompute divides a bucket; else a bucket is reduced only after the first of its blocks."""
        return self._of(self.first[stage] + self.stages[stage].count - 1, divided=divided)

    def blocks(self, stage: int, *, divided: bool = True, but_first: bool = False) -> list[PhaseSums]:
        """The same for all of its blocks, without the last of several, equal cases once; `but_first`: without the
        reduction after the first one."""
        first, count = self.first[stage], self.stages[stage].count
        cases: list[PhaseSums] = []
        for region in range(first, first + max(1, count - 1)):
            case = self._of(region, divided=divided)
            if but_first and region == first:
                case = {phase: sums for phase, sums in case.items() if phase is not Phase.REDUCING}
            if case not in cases:
                cases.append(case)
        return cases

    def cast(self, stage: int) -> int | None:
        """What is there of a stage's bucket while its reduced gradients are cast; None where none are cast."""
        is_cast = any(transfer.landed for read in self._reads[0].reduced[stage] for transfer, _ in read)
        return self._seen_from(None, "landed", stage, None) if is_cast else None

    def lands(self, stage: int) -> bool:
        """Whether the landing of a bucket may be the peak of any of a stage's blocks."""
        first, count = self.first[stage], self.stages[stage].count
        either = self.division.grouping, self.division.divided
        regions = range(first, first + count)
        return any(Phase.LANDING in backward_transfers(grouping, region) for grouping in either for region in regions)

    def _of(self, region: int, *, divided: bool) -> PhaseSums:
        phases = self._phases(region)
        if not self.grouping.begins(region) and not (divided and self._dividing(region)):
            del phases[Phase.REDUCING]
        return {
            phase: [self._bytes(field, region, owner, there) for field, owner, there in terms_beside_copies(terms)]
            for phase, terms in phases.items()
        }

    def _phases(self, region: int) -> dict[Phase, Terms]:
        """What is there in each phase of a region: enough for both cases, that blocks of other stages share buckets and
        that they have their own."""
        with_it = self.division.of(self.stage_of[region])
        grouping, other_grouping = (self._grouping_where(with_it, are_divided) for are_divided in (False, True))
        phases = backward_transfers(grouping, region, _DIVIDED)
        other_phases = backward_transfers(other_grouping, region, _DIVIDED) if other_grouping is not grouping else {}
        for phase, terms in other_phases.items():
            there = Counter((field, self.stage_of[of_region]) for field, of_region in phases.get(phase, ()))
            further = []
            for field, of_region in terms:
                there[field, self.stage_of[of_region]] -= 1
                if there[field, self.stage_of[of_region]] < 0:
                    further.append((field, of_region))
            phases[phase] = (*phases.get(phase, ()), *further)
        return phases

    def _grouping_where(self, with_it: frozenset[int], divided: bool) -> Grouping:
        """The grouping in which stages `with_it` have own buckets if this object is that case, and others if
        `others`."""
        numbered = enumerate(self.stage_of)
        apart = {
            i for i, stage in numbered if self.division.of(stage) and (self._of_own if stage in with_it else divided)
        }
        return self.division.grouping.divided(apart)

    def dividing(self, stage: int) -> list[int]:
        """The stages whose recompute would divide a stage's buckets, so that they are reduced after its blocks (without
        the last of several); none where one of these is the first of a bucket, after which it is reduced anyway."""
        first, count = self.first[stage], self.stages[stage].count
        begins = any(self.grouping.begins(region) for region in range(first, first + max(1, count - 1)))
        return [] if begins else self._dividing(first)

    def reducing(self, stage: int) -> Counter[int]:
        """The stages that own what is there when a stage's bucket is reduced, itself among them, each with the number
        of blocks that share a bucket of it."""
        terms = backward_transfers(self.grouping, self.first[stage])[Phase.REDUCING]
        regions = {self.stage_of[region]: region for region in (*(region for _, region in terms), self.first[stage])}
        return Counter({number: len(self.grouping.together(region)) for number, region in regions.items()})

    def _dividing(self, region: int) -> list[int]:
        stages = dict.fromkeys(self.stage_of[other] for other in (region - 1, region))
        return [stage for stage in stages if self.stages[stage].depth]

    def _bytes(self, field: str, region: int, owner: int, there: int | None) -> int | None:
        if field != _DIVIDED:
            shares = there is not None and self.grouping.share(owner, there)
            stage_there = self.stage_of[there] if there is not None and shares else None
            return self._seen_from(self.stage_of[region], field, self.stage_of[owner], stage_there)
        key = self.stage_of[region], self.stage_of[owner]
        if key not in self._left:
            self._left[key] = self._left_where_divided(*key)
        return self._left[key]

    def _left_where_divided(self, stage: int, behind: int) -> int | None:
        """D of the module docstring, for a block of `stage` and the next block, which is of the stage `behind`."""
        reads = [
            {v: max(transfer.left_of_one, transfer.left_of_rest) for transfer, v in read}
            for read in self._reads[0].reduced[behind]
        ]
        most = sum(max(sizes.values(), default=0) for sizes in reads) / UNIT
        whether = [self.model.any_recomputed[number][0] for number in {stage, behind} if self.stages[number].depth]
        if not most or not whether:
            return None
        left = self.program.variable("left where divided", upper=most, whole=False)
        sizes = [(v, -size / UNIT) for of_read in reads for v, size in of_read.items()]
        for q in whether:
            self.program.at_least("left where divided", [(left, 1.0), (q, -most), *sizes], -most)
        return left

    def _seen_from(self, viewer: int | None, field: str, stage: int, there: int | None) -> int | None:
        """What the rows of stage `viewer` count of a stage. Stages that share buckets are in the same case, so they see
        their own sums; others see a bound on both cases."""
        with_it = self.division.of(stage)
        if not with_it or viewer in with_it:
            return self._sum(field, stage, there, own=self._of_own and bool(with_it))
        if (field, stage, there) not in self._seen:
            shared, own = (self._sum(field, stage, there, own=own) for own in (False, True))
            self._seen[field, stage, there] = self.division.seen(
                stage, shared, own, self._most(field, stage, own=False)
            )
        return self._seen[field, stage, there]

    def _sum(self, field: str, stage: int, there: int | None, *, own: bool) -> int | None:
        key = field, stage, there, own
        if key not in self._sums:
            reads = self._reads_of(field, stage, own=own)
            if there is not None:
                reads = self._arriving_beside(stage, there, own=own)
            self._sums[key] = self._total(field, reads, False)
        return self._sums[key]

    def _reads_of(self, field: str, stage: int, *, own: bool) -> Sequence[Read]:
        reads = self._reads[own]
        return (reads.kept if field in GATHER_FIELDS else reads.reduced)[stage]

    def _most(self, field: str, stage: int, *, own: bool) -> float:
        """An upper bound on a sum, in MiB."""
        reads = self._reads_of(field, stage, own=own)
        most = (max((transfer.alone * getattr(transfer, field) for transfer, _ in read), default=0) for read in reads)
        return sum(most) / UNIT

    def _arriving_beside(self, stage: int, there: int, *, own: bool) -> Sequence[Read]:
        """What arrives for a stage beside a copy of stage `there`, or of another block: E of the module docstring."""
        if (stage, there, own) not in self._beside:
            by_alike: dict[Hashable, list[int]] = {}
            for transfer, v in (pair for read in self._reads[own].kept[there] for pair in read):
                if v in self._alike and transfer.arriving:
                    by_alike.setdefault(self._alike[v], []).append(v)
            self._beside[stage, there, own] = [
                [
                    (transfer, left)
                    for transfer, v in read
                    if (left := self._left_of(v, by_alike.get(self._alike.get(v), ()))) is not None
                ]
                for read in self._reads[own].kept[stage]
            ]
        return self._beside[stage, there, own]

    def _left_of(self, v: int, alike: Sequence[int]) -> int | None:
        """E of a flow: itself where none of the other stage is alike, None where it is one of these."""
        if not alike:
            return v
        if v in alike:
            return None
        arriving = self.program.variable("arriving beside", whole=False)
        self.program.at_least(
            "arriving beside", [(arriving, 1.0), (v, -1.0), *((other_flow, 1.0) for other_flow in alike)], 0.0
        )
        return arriving
