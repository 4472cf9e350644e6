"""For each output the dim along which the batch's rows lie is found, although all other dims have the same length."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import Cluster, plan

N = 8  # length of the batch and of every other dim


class Returning(nn.Module):
    """Returns an output for each entry of `RIGHT`; all dims have length N."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(N, N), nn.Linear(N, N)
        self.scale = nn.Parameter(torch.ones(N))
        self.lstm = nn.LSTM(N, N)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x.flatten(1).view(N, N, N)).softmax(-1)
        one, other = h.mean(1), self.second(x).mean(1)
        return {
            "hidden": h,
            "load": h.mean((0, 1)),
            "parameter": self.scale * 2,
            "by sequence": h.transpose(0, 1),
            "recurrent": self.lstm(h.transpose(0, 1))[0],
            "alike": other @ one.T,
            "alike the other way": (other @ one.T).T,
            "merged": h.flatten(0, 1),
            "ids": h.argmax(-1),
            "loss": h.square().sum(),
        }


RIGHT = {
    "hidden": 0, "load": -1, "parameter": -1, "by sequence": 1, "recurrent": 1, "alike": 0, "alike the other way": 0,
    "merged": 0, "ids": 0, "loss": -1,
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2,), (2, 2), (1, 4)])
def test_rows_are_followed_through_the_ops(shape: tuple[int, ...]) -> None:
    x = torch.empty(N, N, N)
    made = plan(Returning(), {"x": x}, Cluster.preset("cpu", shape), inputs="local")
    assert dict(zip(RIGHT, made.batch_dims, strict=True)) == RIGHT
    assert plan(Returning(), {"x": x}, Cluster.preset("cpu", shape)).batch_dims == ()
