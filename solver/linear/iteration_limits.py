"""How many iterations of the simplex method a start of HiGHS may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationLimits:
    """Limits of simplex iterations; a warm start that reaches its limit is given up for a cold start.

    Limits "by cold start" are multiples of the iterations that the last cold start took, those "by rows" multiples of
    the number of rows.
    """

    least: int = 1_500  # lower bound on all these limits but `cold_steps`
    warm_by_cold_start: float = 1.0
    warm_by_cold_start_in_box: float = 0.25  # with other bounds of counts, where a warm start may take as long
    warm_by_rows: float = 0.3  # of a warm start from the basis of another program, before any cold start
    cold_steps: tuple[int, ...] = (10_000, 10_000, 10_000)  # of a cold start in a box: the cutoff is checked after each
    unperturbed_by_rows: float = 0.25  # of a cold start without cost perturbation: one that takes more is not worth it
    perturbed_by_rows: float = 0.6  # after which a cold start switches cost perturbation off, or on again

    def warm(self, rows: int, cold_start: int, *, patient: bool) -> int:
        """The limit of a warm start, after a cold start of so many iterations (0: there was none)."""
        if patient and not cold_start:
            return self.by_rows(self.warm_by_rows, rows)
        multiple = self.warm_by_cold_start if patient else self.warm_by_cold_start_in_box
        return max(self.least, int(multiple * cold_start))

    def by_rows(self, multiple: float, rows: int) -> int:
        return max(self.least, int(multiple * rows))
