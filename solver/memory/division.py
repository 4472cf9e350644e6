"""Two cases of memory rows: small blocks share buckets, but a block recomputed as a whole has a bucket of its own.

Stages are together if any of their blocks share a bucket. k tells whether any block of stages that are together is not
recomputed as a whole; if k = 0, each bucket in flight is that of one block. The rows of `solver.memory.peaks` with
shared buckets are switched off then. Those with own buckets always hold, since they are implied by the rows with shared
ones where these are on. Other stages see T bytes of the blocks: S in shared buckets, or s in own ones::

    T >= s,  T >= S - most S * (1 - k)

If only some of the blocks that share buckets are recomputed, shared buckets count for all of them, and beside these A,
what may arrive for the own bucket of a recomputed block before, of s bytes; q tells whether there is one::

    A >= s - most s * (1 - q)

So the rows count more than the prediction where whole groups of such blocks are recomputed and others are not.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost.buckets.grouping import Grouping
from autopar.solver.model import Model


class Division:
    """Which of a model's stages share buckets, and the variables k, T and A of the module docstring."""

    def __init__(self, model: Model) -> None:
        self.model, self.program, self.grouping = model, model.program, model.problem.grouping
        stages = model.problem.stages
        stage_of = model.problem.stage_of_region
        groups = [{stage_of[other] for other in self.grouping.together(region)} for region in range(len(stage_of))]
        self._together: list[frozenset[int]] = [frozenset()] * len(stages)  # by stage, empty where nothing is shared
        together: set[int] = set()
        for region, group in enumerate(groups):  # in order: stages that are together follow one another
            together = (together | group) if together & group else set(group)
            if self.grouping.shares(region):
                for stage in together:
                    self._together[stage] = frozenset(together)
        for stage, with_it in enumerate(self._together):
            if not all(stages[other].depth for other in with_it):
                self._together[stage] = frozenset()
        self._buckets: dict[frozenset[int], set[int]] = {}  # by stages, the first regions of each
        for region, stage in enumerate(stage_of):
            self._buckets.setdefault(self._together[stage], set()).add(self.grouping.together(region).start)
        regions = {i for i, stage in enumerate(stage_of) if self._together[stage]}
        self.divided: Grouping = self.grouping.divided(regions)
        self._kept: dict[frozenset[int], int] = {}

    def of(self, stage: int) -> frozenset[int]:
        """The stages that are together with a stage, itself among them; none if its blocks share no bucket, or if any
        of these stages cannot be recomputed."""
        return self._together[stage]

    def kept(self, stage: int) -> int:
        """k of the module docstring, for the stages together with this one."""
        together = self._together[stage]
        if together not in self._kept:
            by_stage = [self.model.kept(other) for other in sorted(together)]
            self._kept[together] = by_stage[0]
            if len(by_stage) > 1:
                self._kept[together] = self.program.variable("k", upper=1.0, whole=False)
                for kept in by_stage:
                    self.program.at_least("k", [(self._kept[together], 1.0), (kept, -1.0)], 0.0)
        return self._kept[together]

    def seen(self, stage: int, shared: int | None, own: int | None, most: float) -> int | None:
        """T of the module docstring, from S (`shared`, at most `most`) and s (`own`), in MiB."""
        if shared is None or not most:
            return shared
        seen = self.program.variable("seen", upper=None, whole=False)
        self.program.at_least("seen", [(seen, 1.0), (shared, -1.0), (self.kept(stage), -most)], -most)
        if own is not None:
            self.program.at_least("seen", [(seen, 1.0), (own, -1.0)], 0.0)
        return seen

    def arriving(self, stage: int, own: Callable[[int], list[tuple[int | None, float]]]) -> int | None:
        """A of the module docstring; None where there is only one bucket. `own`: what arrives of a stage's own buckets,
        as sums in MiB with an upper bound on each."""
        if len(self._buckets[self._together[stage]]) < 2:
            return None
        arriving = self.program.variable("arriving", upper=None, whole=False)
        for other in sorted(self._together[stage]):
            sums = own(other)
            most = sum(size for _, size in sums)
            terms = [(v, -1.0) for v, _ in sums if v is not None]
            q = self.model.any_recomputed[other][-1]
            if terms:
                self.program.at_least("arriving", [(arriving, 1.0), *terms, (q, -most)], -most)
        return arriving
