"""Buckets that a relaxation opens in part, and boxes without them or with the whole of them.

A block's parameters move through as many buckets as there are ways in which they move, and each takes a latency
(`solver.seconds.bucket_latency`). A relaxation has a part of the block move in one way and a part in another, so that
all axes of the mesh are in use and more hides behind compute, and pays one latency for all: the plans that it mixes all
have the same ways for all parameters, so that no row cuts it off. Cuts by choices come to the parameters one after
another. Cut by whether a bucket is there at all, all of them go another way, or its latency is paid in full.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.linear.outcome import WHOLE, Bounds, Outcome
from autopar.solver.linear.program import Program

_LEAST = 1e-2  # of the objective: of a latency, the part that is worth a cut; below, cuts by choices prove sooner


class Openings:
    """The variables of a program that tell whether a bucket is there (`solver.linear.records.Opened`)."""

    def __init__(self, program: Program) -> None:
        self._numbers = np.array([one.variable for one in program.opened], dtype=np.int64)
        self._latencies = np.array([one.many * program.cost[one.missing] for one in program.opened])

    def split(self, node: Outcome) -> tuple[Bounds, Bounds] | None:
        """A relaxation's box in two, the likelier part first; None where no bucket that matters is there in part."""
        if node.status != "optimal" or not len(self._numbers):
            return None
        values = node.values[self._numbers]
        in_part = (values > WHOLE) & (values < 1 - WHOLE)
        lost = np.where(in_part, self._latencies * np.minimum(values, 1 - values), 0.0)
        at = int(lost.argmax())
        if lost[at] <= _LEAST * abs(node.objective):
            return None
        ends = (1.0, 0.0) if values[at] > 1 / 2 else (0.0, 1.0)
        one, other = ({**node.counts, int(self._numbers[at]): (end, end)} for end in ends)
        return one, other
