"""Guards and shapes: a condition that uses an activation's shape is evaluated again without computing the activation;
shapes that depend on known inputs are guarded themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.tracing import known, trace

Tensor = torch.Tensor
# of the mask of chosen ids, hidden values, other activations
ASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "size": lambda chosen, hidden, other: chosen.sum() * hidden.shape[-1] == other.numel(),
    "expand_as": lambda chosen, hidden, other: chosen[..., None].expand_as(hidden).sum() == other.numel(),
    "view_as": lambda chosen, hidden, other: chosen.view_as(hidden[..., 0]).sum() == other.shape[0],
    "picked": lambda chosen, hidden, other: torch.tensor(hidden[chosen].shape == other.shape),
    "filled": lambda chosen, hidden, other: (torch.ones_like(hidden[..., 0]) * chosen).sum() == other.shape[0],
}


class Placed(nn.Module):
    """Replaces tokens of one kind by features, after checking that their numbers agree."""

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


COUNTS: dict[str, Callable[[Tensor], float]] = {
    "unique": lambda g: len(g.unique()),
    "several": lambda g: len(torch.unique(g, return_counts=True)[1]),
    "picked": lambda g: g[g > 1].numel(),
    "nonzero": lambda g: (g > 1).nonzero().shape[0],
    "where": lambda g: torch.where(g > 1)[0].size(0),
    "one_hot": lambda g: nn.functional.one_hot(g).shape[-1],
    "bincount": lambda g: len(g.bincount()),
    "item": lambda g: g.max().item(),
    "numpy": lambda g: np.unique(np.sort(g.numpy())).size,
}


@pytest.mark.parametrize("kind", COUNTS)
def test_how_many_there_are_of_a_known_input_is_read_again(kind: str) -> None:
    def counted(x: Tensor, groups: Tensor) -> Tensor:
        return x.square().sum() / COUNTS[kind](groups)

    x, groups = torch.randn(4, 3), torch.tensor([0, 1, 2, 3, 4, 5])
    traced = trace(counted, {"x": x, "groups": known(groups)})
    torch.testing.assert_close(traced.gm(*traced.bind((x, groups.clone()))), counted(x, groups))
    with pytest.raises(InputError, match="the trace took"):
        traced.bind((x, torch.tensor([0, 0, 1, 1, 2, 2])))


def test_how_many_there_are_of_constants_is_not() -> None:
    traced = trace(lambda x: x.sum() / len(torch.tensor([1, 1, 2]).unique()), {"x": torch.randn(4)})
    assert not traced.reads_values


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("kernel", torch.tensor(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)[:, : int(self.kernel)]
        return y.square().mean() if mask.all() else (y * mask[:, None]).square().mean()


def test_ranks_that_have_a_part_each_cannot_read_the_whole() -> None:
    cluster, x, mask = autopar.Cluster.preset("cpu", (2,)), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    with pytest.raises(InputError, match=r"all\(\) at .*|bool\(\) at .*each rank has a part .*: plan with inputs="):
        autopar.plan(Masked(), {"x": x, "mask": known(mask)}, cluster, inputs="local")
    autopar.plan(Masked(), {"x": x, "mask": known(mask)}, cluster)
    autopar.plan(Masked(), {"x": x}, cluster, concrete_args={"mask": mask.logical_or(mask)}, inputs="local")
