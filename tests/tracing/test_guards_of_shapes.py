"""A reading that is computed with the shape of an activation: read again without what makes the activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.tracing import known, trace

Tensor = torch.Tensor
ASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # of chosen ids, hidden and other activations
    "size": lambda chosen, hidden, other: chosen.sum() * hidden.shape[-1] == other.numel(),
    "expand_as": lambda chosen, hidden, other: chosen[..., None].expand_as(hidden).sum() == other.numel(),
    "view_as": lambda chosen, hidden, other: chosen.view_as(hidden[..., 0]).sum() == other.shape[0],
    "picked": lambda chosen, hidden, other: torch.tensor(hidden[chosen].shape == other.shape),
    "filled": lambda chosen, hidden, other: (torch.ones_like(hidden[..., 0]) * chosen).sum() == other.shape[0],
}


class Placed(nn.Module):
    """Tokens of one kind are replaced, if they are as many as there are features."""

    def __init__(self, ask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.linear, self.ask = nn.Embedding(8, 4), nn.Linear(3, 4), ask

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        chosen, hidden, other = ids == 3, self.embed(ids), self.linear(features)
        if not self.ask(chosen, hidden, other):
            raise ValueError("tokens and features do not match")
        return hidden.masked_scatter(chosen[..., None].expand_as(hidden), other)


@pytest.mark.parametrize("kind", ASKS)
def test_what_makes_an_activation_does_not_run_for_its_shape(kind: str) -> None:
    ids, features = torch.tensor([[3, 1, 3], [0, 3, 2]]), torch.randn(3, 3)
    model = Placed(ASKS[kind])
    traced = trace(model, {"ids": known(ids), "features": features})
    torch.testing.assert_close(traced.gm(ids, features), model(ids, features))

    def attribute(name: str) -> Tensor:
        raise AssertionError(f"the reading runs what reads '{name}'")

    traced.guards.check([ids.flip(1), features], attribute)
    with pytest.raises(InputError, match="the trace took"):
        traced.guards.check([ids + 1, features], attribute)


def test_inputs_of_other_shapes_are_read_with_theirs() -> None:
    class Fewer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            hidden = self.linear(x)
            return hidden if kept.sum() < hidden.shape[0] else hidden * 2

    model, kept = Fewer(), torch.tensor([1, 0, 1, 0])
    traced = trace(model, {"x": torch.randn(5, 3), "kept": known(kept)}, prove_sizes=True)
    x = torch.randn(7, 3)
    torch.testing.assert_close(traced.gm(*traced.bind((x, kept))), model(x, kept))
    with pytest.raises(InputError, match="the trace took"):
        traced.bind((x[:2], kept))
