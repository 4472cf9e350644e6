"""How much communication hides behind compute: gathers of parameters and reductions of their gradients.

While a collective runs, compute goes on at `device.overlap` of its rate, so that a second of communication saves this
part of a second, as long as there is compute. Each mesh axis has its own links and stream, so that the collectives of
several axes hide behind the same compute. The rows below hold for each axis. c is a stretch of the graph
(`cost.buckets.grouping`) with m groups of n buckets each; F and B are forward and backward compute of one of k
micro-batches; G, A and R are the seconds that could be saved in a step of gathers, gathers again in backward, and
reductions; small letters are what is hidden of them::

    g_c <= G_c      g_c <= k (1 - 1 / m n) F_c                     the first bucket has nothing before it
    a_c <= A_c      a_c <= k (1 - 1 / m n) B_c
    t_c <= t_(c-1) + R_c                                           t_c: hidden reductions of stretches up to c,
    t_c <= B_1 + ... + B_(c-1) + (1 - 1 / m n) B_c                 behind what the backward pass does after them
    t_c <= B_1 + ... + B_(c-1) + (1 - 1 / n) B_c / m + (1 - 1 / m) R_c     (of the first group: R_c / m)
    b   <= t_last + sum a_c         b <= k sum B_c                 both hide behind the same backward

What is hidden is the maximum of sum g_c + b, added up over the axes. `solver.seconds.overlap` states the same rows in
the integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost.buckets.grouping import Stretch


@dataclass
class Movable:
    """Seconds of collectives in a step over one axis that may hide, by stretch: gathers in forward, gathers again in
    backward, reductions."""

    stretches: int
    gathers: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    reductions: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gathers, self.again, self.reductions = ([0.0] * self.stretches for _ in range(3))


def hidden_seconds(
    stretches: Sequence[Stretch],
    movable: Sequence[Movable],
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    overlap: float = 1.0,
) -> float:
    """Seconds of a step that communication saves by running beside compute.

    `movable`: by axis; `forward` and `backward`: compute seconds of a micro-batch by stretch; `overlap`: the rate of
    compute while a collective runs, as a part of its full rate.

    >>> movable = Movable(2)
    >>> movable.reductions = [1.0, 1.0]
    >>> hidden_seconds([Stretch(0, 1, 1), Stretch(5, 1, 1)], [movable], [3.0, 3.0], [0.5, 6.0], 1)
    0.5
    """
    return sum(_on_one_axis(stretches, of_axis, forward, backward, micro_batches, overlap) for of_axis in movable)


def _on_one_axis(
    stretches: Sequence[Stretch],
    movable: Movable,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    overlap: float,
) -> float:
    """The maximum of the rows in the module's docstring for one axis: greedy, stretch by stretch.

    `gathers` is sum g_c, `again` sum a_c, `reduced` t_c, and `before` B_1 + ... + B_(c-1).
    """
    gathers = again = before = reduced = 0.0
    for c, stretch in enumerate(stretches):
        own = 1 - 1 / (stretch.count * stretch.buckets)
        gathers += min(overlap * movable.gathers[c], micro_batches * own * forward[c])
        again += min(overlap * movable.again[c], micro_batches * own * backward[c])
        first = (1 - 1 / stretch.buckets) * backward[c] / stretch.count
        reduced = min(
            reduced + overlap * movable.reductions[c],
            before + own * backward[c],
            before + first + (1 - 1 / stretch.count) * overlap * movable.reductions[c],
        )
        before += backward[c]
    return gathers + min(reduced + again, micro_batches * before)
