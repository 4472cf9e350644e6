"""Memory rows of blocks that share weights: their gradients exist from the last block's backward on."""

from __future__ import annotations

import pytest
import torch
from test_rows import check
from thinned import thinned
from torch import nn
from torch.nn import functional
from toys import cluster, on_meta, toy

MOST = 1.1  # the rows may be at most this multiple of the predicted peak; small blocks count more


class Again(nn.Module):
    """One block applied many times; after a product (`behind`) its first application makes an input gradient too."""

    def __init__(self, times: int, behind: bool) -> None:
        super().__init__()
        self.times, self.first = times, nn.Linear(16, 16) if behind else nn.Identity()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = x + self.norm(self.down(functional.gelu(self.up(x))))
        return x.square().mean()


@pytest.mark.parametrize(
    ("mesh", "micro_batches", "fold", "behind"),
    thinned(2, [(2,), (2, 2)], [1, 2], [True, False], [True, False]),
    ids=str,
)
def test_rows_of_one_block_many_times(mesh: tuple[int, ...], micro_batches: int, fold: bool, behind: bool) -> None:
    """Weights that are large beside the activations, and some that are not. The drawn layouts differ from call to call:
    rows count the first part of each sum of gradients twice."""
    for seed, rows in enumerate((16, 64, 256)):
        x, on = torch.empty(rows, 16, device="meta"), cluster(*mesh, seed=seed)
        asked = toy(on_meta(Again, 4, behind), x, on=on, micro_batches=micro_batches)
        check(asked, seed, fold=fold, most=MOST + 0.1)
