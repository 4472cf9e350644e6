"""Statistics of the counter-based masks: independent along dims, across rows, nodes, steps and seeds."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.runtime.randomness import RandomState, bits, keep

SIDE = 512
CPU = torch.device("cpu")


def mask(key: torch.Tensor, position: int = 0, drop: float = 0.5, side: int = SIDE) -> torch.Tensor:
    index = torch.arange(side, dtype=torch.int32)
    return keep(bits(key, position, (index, index)), drop).double()


def assert_independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """The correlation of two masks of fair coins is within 5 standard deviations of 0."""
    correlation = ((a - 0.5) * (b - 0.5)).mean().item() * 4
    assert abs(correlation) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("drop", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_share_of_zeros(drop: float) -> None:
    found = mask(RandomState(0, CPU).next_key(), drop=drop)
    deviation = math.sqrt(drop * (1 - drop))
    for dims, count in (((0, 1), SIDE * SIDE), ((0,), SIDE), ((1,), SIDE)):
        assert ((1 - found).mean(dims) - drop).abs().max().item() <= 5 * deviation / math.sqrt(count)


def test_neighbours_are_independent() -> None:
    found = mask(RandomState(3, CPU).next_key())
    for distance in (1, 2, 64, 256):
        assert_independent(found[distance:], found[:-distance])
        assert_independent(found[:, distance:], found[:, :-distance])
        assert_independent(found[distance:, distance:], found[:-distance, :-distance])
    assert_independent(found, found.T)


def test_nodes_steps_and_seeds_are_independent() -> None:
    state = RandomState(0, CPU)
    first, second, other = state.next_key(), state.next_key(), RandomState(1, CPU).next_key()
    masks = [mask(first), mask(second), mask(other), mask(first, position=1), mask(second, position=1)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert_independent(a, b)


def test_rows_of_one_mask_are_all_different() -> None:
    found = mask(RandomState(0, CPU).next_key(), side=2048)
    assert len(torch.unique(found, dim=0)) == 2048


def test_state_resumes() -> None:
    """A restored state draws what the original would have drawn."""
    state = RandomState(5, CPU)
    state.next_key()
    saved = state.state_dict()
    expected = [state.next_key(), state.next_key()]
    resumed = RandomState(6, CPU)
    resumed.load_state_dict(saved)
    assert [resumed.next_key(), resumed.next_key()] == expected
