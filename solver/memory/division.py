"""Small blocks share buckets, but each that is recomputed as a whole has its own: rows for where all of them are.

Stages are together where any of their blocks share a bucket. k tells whether any block of such stages is not recomputed
as a whole; where it is 0, what is on its way is of buckets of one block. The rows of `solver.memory.peaks` that count
with shared ones say nothing then, and those with buckets of one block count at any rate, as they say less than the
others where these count. What other stages see of these blocks is T, of S bytes in shared buckets and s in own ones::

    T >= s,  T >= S - most S * (1 - k)

Where some buckets are of recomputed blocks and others are not, shared buckets count for all of them, and beside these
what may arrive for a recomputed block before, A, of the bytes s that arrive of one::

    A >= s - most s * (1 - q)

So rows say more than the prediction there where whole groups are recomputed, and others are not.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost.buckets.grouping import Grouping
from autopar.solver.model import Model


class Division:
    """Of a model's stages."""

    def __init__(self, model: Model) -> None:
        self.model, self.program, self.grouping = model, model.program, model.problem.grouping
        stages = model.problem.stages
        stage_of = [i for i, stage in enumerate(stages) for _ in range(stage.count)]
        groups = [{stage_of[one] for one in self.grouping.together(region)} for region in range(len(stage_of))]
        self._together: list[frozenset[int]] = [frozenset()] * len(stages)  # by stage, empty where nothing is shared
        some: set[int] = set()
        for region, group in enumerate(groups):  # in order, so that stages that are together follow one another
            some = (some | group) if some & group else set(group)
            if self.grouping.shares(region):
                for stage in some:
                    self._together[stage] = frozenset(some)
        for stage, with_it in enumerate(self._together):
            if not all(stages[one].depth for one in with_it):
                self._together[stage] = frozenset()
        self._buckets: dict[frozenset[int], set[int]] = {}  # by stages, the first regions of each
        for region, stage in enumerate(stage_of):
            self._buckets.setdefault(self._together[stage], set()).add(self.grouping.together(region).start)
        regions = {i for i, stage in enumerate(stage_of) if self._together[stage]}
        self.divided: Grouping = self.grouping.divided(regions)
        self._kept: dict[frozenset[int], int] = {}

    def of(self, stage: int) -> frozenset[int]:
        """The stages that are together with one, itself among them; none where its blocks share no bucket, or where not
        all of these can be recomputed."""
        return self._together[stage]

    def kept(self, stage: int) -> int:
        """k of the head of this file."""
        some = self._together[stage]
        if some not in self._kept:
            each = [self.model.kept(one) for one in sorted(some)]
            self._kept[some] = each[0]
            if len(each) > 1:
                self._kept[some] = self.program.variable("k", upper=1.0, whole=False)
                for one in each:
                    self.program.at_least("k", [(self._kept[some], 1.0), (one, -1.0)], 0.0)
        return self._kept[some]

    def seen(self, stage: int, shared: int | None, own: int | None, most: float) -> int | None:
        """T of the head of this file, of two sums in MiB."""
        if shared is None or not most:
            return shared
        found = self.program.variable("seen", upper=None, whole=False)
        self.program.at_least("seen", [(found, 1.0), (shared, -1.0), (self.kept(stage), -most)], -most)
        if own is not None:
            self.program.at_least("seen", [(found, 1.0), (own, -1.0)], 0.0)
        return found

    def arriving(self, stage: int, own: Callable[[int], list[tuple[int | None, float]]]) -> int | None:
        """A of the head of this file, where there are several buckets; `own`: sums in MiB of a stage that arrive, each
        with its most."""
        if len(self._buckets[self._together[stage]]) < 2:
            return None
        found = self.program.variable("arriving", upper=None, whole=False)
        for one in sorted(self._together[stage]):
            sums = own(one)
            most = sum(size for _, size in sums)
            terms = [(v, -1.0) for v, _ in sums if v is not None]
            q = self.model.any_recomputed[one][-1]
            if terms:
                self.program.at_least("arriving", [(found, 1.0), *terms, (q, -most)], -most)
        return found
