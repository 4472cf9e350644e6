"""Branching on buckets: if a relaxation opens a bucket in part, split its box into "closed" and "open".

A block's parameters use one bucket for each way in which they move (kinds and mesh axes of the collectives), and each
bucket takes its latencies (`solver.seconds.bucket_latency`). A relaxation mixes plans in each of which all parameters
move in one way. So it uses all axes of the mesh, hides more behind compute, and still pays only about one latency; no
row cuts this mixture off. Branching on choices would treat the parameters one after another. Branching on whether the
bucket is open either makes all parameters move in other ways, or makes the relaxation pay the bucket's latency in full.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.linear.outcome import INTEGRALITY, Bounds, Outcome
from autopar.solver.linear.program import Program

_MIN_UNPAID_SHARE = 1e-2  # of the objective; where the unpaid latency is less, branching on choices proves sooner


class Openings:
    """The 0/1 variables of a program that say whether a bucket is open (`solver.linear.records.Opened`)."""

    def __init__(self, program: Program) -> None:
        buckets = program.records.opened
        self._numbers = np.array([bucket.variable for bucket in buckets], dtype=np.int64)
        self._latencies = np.array([bucket.latencies * program.cost[bucket.missing] for bucket in buckets])

    def split(self, node: Outcome) -> tuple[Bounds, Bounds] | None:
        """The two parts of a relaxation's box, the likelier one first; None if no bucket of weight is open in part."""
        if node.status != "optimal" or not len(self._numbers):
            return None
        values = node.values[self._numbers]
        in_part = (values > INTEGRALITY) & (values < 1 - INTEGRALITY)
        lost = np.where(in_part, self._latencies * np.minimum(values, 1 - values), 0.0)
        at = int(lost.argmax())
        if lost[at] <= _MIN_UNPAID_SHARE * abs(node.objective):
            return None
        ends = (1.0, 0.0) if values[at] > 1 / 2 else (0.0, 1.0)
        likelier, other = ({**node.counts, int(self._numbers[at]): (end, end)} for end in ends)
        return likelier, other
