"""The latency of buckets that conversions do not pay themselves: the rows of `cost.buckets.latency`, with its letters.

Each conversion m of a parameter pays its share p_m of a bucket's latency, but a bucket costs its full latency however
little is in it. For each block and way w to move (collectives and mesh axes), with flows f of the conversions m that
move so::

    c_w = sum_m p_m f_m                   the shares that are paid
    b_w >= f_m            for every m     whether any moves so: a 0/1 variable, which the search branches on
    e_w >= n b_w - c_w                    missing buckets: each costs a latency
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost.buckets.latency import Phase, moves_of
from autopar.cost.collectives import least_latency
from autopar.solver.linear.records import Opened
from autopar.solver.linear.terms import Array, Linear
from autopar.solver.problem import Tensor
from autopar.solver.seconds.shares import Shares

if TYPE_CHECKING:
    from autopar.solver.model import Model


@dataclass
class _Bucket:
    """What may move in one way in a block. `asking`: for each conversion that needs the bucket, its variables, of which
    at most one is 1; `parts`: the shares of all conversions, c_w; `most`: the largest possible sum of these."""

    tensor: Tensor
    asking: dict[bytes, Array] = field(default_factory=dict)
    parts: Linear = field(default_factory=Linear)
    most: float = 0.0


class BucketLatency:
    """The buckets that a model's parameters may be in."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._buckets: defaultdict[tuple[Phase, int], dict[int, _Bucket]] = defaultdict(dict)

    def add(
        self,
        phase: Phase,
        tensor: Tensor,
        variables: Array,
        shares: Shares | None,
        at: Array,
        seconds: Array,
        *,
        uses: int = 1,
    ) -> None:
        """Record a parameter's conversions in a phase: their variables, the places `at` of these on the grid of
        `shares`, and the grid's seconds by axis. With several `uses` several layouts may be wanted at once."""
        node, grouping = self.model.problem.ops[tensor.source].node, self.model.problem.grouping
        if shares is None or self.model.bare or not grouping.in_one_block(node):
            return
        numbers = shares.reductions if phase == "reductions" else shares.gathers
        ways = np.where(seconds.any(axis=0), numbers, 0)[at]
        parts, asks = shares.parts[at], shares.asks[at]
        buckets = self._buckets[phase, grouping.home(node)]
        for way in np.unique(ways[ways > 0]).tolist():
            of_way = ways == way
            bucket = buckets.setdefault(way, _Bucket(tensor))
            bucket.parts.add(variables[of_way], parts[of_way])
            bucket.most += float(parts[of_way].sum())
            for asking in _apart(of_way & asks, np.nonzero(at)[1], uses):
                bucket.asking[variables[asking].tobytes()] = variables[asking]

    def pay(self) -> None:
        """Add the rows of all buckets, and charge the missing latencies."""
        program, problem = self.model.program, self.model.problem
        axes = problem.cluster.axes
        for (phase, region), ways in self._buckets.items():
            full = problem.grouping.buckets(region)
            for way, bucket in ways.items():
                if not bucket.asking:
                    continue
                seconds: defaultdict[int, float] = defaultdict(float)
                for kind, axis in moves_of(way, len(axes)):
                    seconds[axis] += least_latency(kind, axes[axis])
                paid = program.variable("paid", upper=bucket.most, whole=False)
                program.equal_to_sum("paid", paid, bucket.parts.terms())
                missing = program.variable("missing", upper=full, whole=False)
                opened = program.variable("opened", integer=True)
                program.at_least("missing", [(missing, 1.0), (paid, 1.0), (opened, -full)], 0.0)
                for asking in bucket.asking.values():
                    program.at_least("opened", [(opened, 1.0), *((v, -1.0) for v in asking.tolist())], 0.0)
                program.records.opened.append(Opened(opened, missing, full))
                self.model.pay_missing(phase, bucket.tensor, missing, seconds)


def _apart(asks: Array, wanted: Array, uses: int) -> list[Array]:
    """The asking conversions as sets of which at most one runs: a single set if there is one use, which wants a single
    layout, else one set for each wanted layout."""
    sets = [asks] if uses == 1 else [asks & (wanted == layout) for layout in np.unique(wanted).tolist()]
    return [conversions for conversions in sets if conversions.any()]
