"""Labels selected by a mask, as CTC losses take them, are padded rows in the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.tracing import trace
from autopar.tracing.errors import UnknownDataError


class Spelling(nn.Module):
    """The loss as computed by transformers' models with a CTC head."""

    def __init__(self, counted: str = "mask", reduction: str = "mean") -> None:
        super().__init__()
        self.head, self.counted, self.reduction = nn.Linear(5, 7, dtype=torch.float64), counted, reduction

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = (labels != -100) & (labels != 0)
        lengths = mask.sum(-1).long() if self.counted == "mask" else (labels > 0).sum(-1)
        targets = labels.masked_select(mask)
        if self.counted == "read":
            return self.head(x).sum() + targets[0]
        logs = self.head(x).log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(logs, targets, input_lengths=frames, target_lengths=lengths, reduction=self.reduction)


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, 7, (4, 6), generator=generator)
    return {
        "x": torch.randn(4, 15, 5, dtype=torch.float64, generator=generator),
        "labels": torch.where(torch.rand(4, 6, generator=generator) < 0.3, -100, labels),  # also between other labels
    }


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_loss_of_picked_labels_is_that_of_eager(reduction):
    model = Spelling(reduction=reduction)
    traced = trace(model, _batch(0))
    assert not traced.failures
    for seed in range(3):
        losses = [f(**_batch(seed)) for f in (traced.gm, model)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        gradients = (torch.autograd.grad(loss.sum(), model.head.weight)[0] for loss in losses)
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("counted", ["others", "read"])
def test_who_else_asks_for_them_is_told(counted):
    """Lengths counted by another mask would split the labels differently; and their total number is unknown."""
    with pytest.raises(UnknownDataError, match=r"is given rows that a mask picked, .* give 'labels' a known example"):
        trace(Spelling(counted), _batch(0))
