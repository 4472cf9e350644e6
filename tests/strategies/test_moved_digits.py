"""Digits (factors of a dim) that views move within a dim are followed a limited number of times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.strategies import positions
from autopar.strategies.derive import positions_of
from autopar.tracing import trace

ROUNDS, PER_ROUND = 6, 4  # PER_ROUND: ops with a rule in a round


class Turning(nn.Module):
    """Each round rotates the twelve bits of 4,096 element indices by five."""

    rounds = ROUNDS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = x.reshape(32, 128).transpose(0, 1).reshape(64, 64).relu()
        return x


def counts(mesh_shape: tuple[int, ...]) -> list[int]:
    """The number of positions of each op, in graph order."""
    graph = trace(Turning(), {"x": torch.empty(64, 64, device="meta")}).graph
    found = [len(some) for some in positions_of(graph, mesh_shape)[1].values()]
    assert len(found) == ROUNDS * PER_ROUND
    return found


@pytest.mark.parametrize(("mesh_shape", "moves"), [((2,), 3), ((2, 4), 3), ((2, 2, 2), 1)], ids=str)
def test_a_digit_is_moved_so_often(mesh_shape: tuple[int, ...], moves: int) -> None:
    followed = sum(map(bool, counts(mesh_shape)))
    assert moves * PER_ROUND <= followed < (moves + 2) * PER_ROUND


def test_a_loop_of_views_makes_every_bit_a_position_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(Turning):
        """Adds its input to the result, so that a sum has the digits of both, which the next round would move again."""

        rounds = 5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    graph = trace(Loop(), {"x": torch.empty(64, 64, device="meta")}).graph
    most = max(map(len, positions_of(graph, (2, 2, 2))[1].values()))
    monkeypatch.setattr(positions, "_ON_MANY", 12)
    assert most <= 4 < max(map(len, positions_of(graph, (2, 2, 2))[1].values()))
