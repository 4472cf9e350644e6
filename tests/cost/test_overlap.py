"""Properties of the communication time that is hidden behind compute."""

from __future__ import annotations

import random

import pytest

from autopar.cost.buckets.grouping import Stretch
from autopar.cost.overlap import Movable, hidden_seconds


def _drawn(draw: random.Random) -> tuple[list[Stretch], Movable, list[float], list[float], int]:
    stretches = [Stretch(i, draw.choice((1, 1, 4)), draw.choice((1, 3))) for i in range(draw.randint(1, 4))]
    movable = Movable(len(stretches))
    for kind in (movable.gathers, movable.again, movable.reductions):
        kind[:] = [draw.choice((0.0, draw.uniform(0, 3))) for _ in stretches]
    forward, backward = ([draw.uniform(0, 3) for _ in stretches] for _ in range(2))
    return stretches, movable, forward, backward, draw.choice((1, 3))


@pytest.mark.parametrize("seed", range(50))
def test_never_more_than_there_is(seed: int) -> None:
    stretches, movable, forward, backward, many = _drawn(random.Random(seed))
    hidden = hidden_seconds(stretches, [movable], forward, backward, many)
    moved = sum(movable.gathers) + sum(movable.again) + sum(movable.reductions)
    assert 0 <= hidden <= min(moved, many * (sum(forward) + sum(backward))) + 1e-12
    nothing = [0.0] * len(stretches)
    assert hidden_seconds(stretches, [movable], nothing, backward, many) <= many * sum(backward) + 1e-12
    assert hidden_seconds(stretches, [movable], nothing, nothing, many) == 0
    assert hidden_seconds(stretches, [Movable(len(stretches))], forward, backward, many) == 0


@pytest.mark.parametrize("seed", range(50))
def test_more_compute_hides_more_and_more_traffic_never_takes_less_time(seed: int) -> None:
    draw = random.Random(seed)
    stretches, movable, forward, backward, many = _drawn(draw)
    hidden = hidden_seconds(stretches, [movable], forward, backward, many)
    c = draw.randrange(len(stretches))
    backward[c] += 1.0
    assert hidden_seconds(stretches, [movable], forward, backward, many) >= hidden - 1e-12
    backward[c] -= 1.0
    for kind in (movable.gathers, movable.again, movable.reductions):
        kind[c] += 1.0
        more = hidden_seconds(stretches, [movable], forward, backward, many)
        assert more <= hidden + 1.0 + 1e-12
        kind[c] -= 1.0


def test_the_last_reduction_is_seen() -> None:
    """One stretch of four blocks: each reduction hides behind the blocks before; the first block's is exposed."""
    movable = Movable(1)
    movable.reductions[0] = 4.0
    assert hidden_seconds([Stretch(0, 4, 1)], [movable], [0.0], [40.0], 1) == pytest.approx(3.0)
    assert hidden_seconds([Stretch(0, 4, 1)], [movable], [0.0], [2.0], 1) == pytest.approx(1.5)


def test_the_first_bucket_of_all_hides_behind_nothing() -> None:
    """Four blocks of two buckets each, with compute that can hide any bucket but the first."""
    movable = Movable(1)
    movable.gathers[0] = movable.again[0] = 100.0
    assert hidden_seconds([Stretch(0, 4, 2)], [movable], [8.0], [0.0], 3) == pytest.approx(3 * 7.0)
    assert hidden_seconds([Stretch(0, 4, 2)], [movable], [0.0], [16.0], 3) == pytest.approx(3 * 14.0)
    movable.reductions[0] = 100.0
    assert hidden_seconds([Stretch(0, 4, 2)], [movable], [0.0], [16.0], 3) == 3 * 16.0, "both: no more than there is"


def test_what_compute_cannot_use_of_the_device_stays() -> None:
    """Beside one second of communication 0.8 seconds of compute get done, so at most that much is saved."""
    movable = Movable(1)
    movable.gathers[0] = 2.0
    assert hidden_seconds([Stretch(0, 100, 1)], [movable], [40.0], [0.0], 1, 0.8) == pytest.approx(1.6)
    assert hidden_seconds([Stretch(0, 100, 1)], [movable], [1.0], [0.0], 1, 0.8) == pytest.approx(0.99)
    assert hidden_seconds([Stretch(0, 100, 1)], [movable], [40.0], [0.0], 1, 0.0) == 0.0


def test_two_axes_hide_behind_the_same_compute() -> None:
    """Each axis has its own stream and can hide behind all compute, whatever the other axis hides."""
    one, other = Movable(1), Movable(1)
    one.gathers[0], other.gathers[0] = 2.0, 40.0
    assert hidden_seconds([Stretch(0, 100, 1)], [one, other], [3.0], [0.0], 1) == pytest.approx(2.0 + 2.97)
