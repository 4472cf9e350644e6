"""Random graphs that read one parameter twice."""

from __future__ import annotations

import random

import torch
from random_graphs import POINTWISE, RUN, WIDTH
from torch import nn
from torch.nn import functional


class Tied(nn.Module):
    """Products with two weights, one of which is also read by another product or by a term added to the loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"tied {seed}")
        self.weights = nn.ParameterList(torch.empty(WIDTH, WIDTH) for _ in range(2))
        self.turns = draw.choice([(0, 1), (0, 0, 1), (0, 1, 0)])
        self.between = draw.choice(POINTWISE)
        self.penalised = draw.choice([[0], [1], []] if len(self.turns) > 2 else [[0], [1]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turn in self.turns:
            x = functional.linear(x, self.weights[turn])
        x = RUN[self.between](x, x).mean()
        for one in self.penalised:
            x = x + self.weights[one].square().sum()
        return x
