"""Leaves are split on the batch of their inputs if runs on half of the rows show that rows do not interact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.leaf_calls import LeafCall
from autopar.planning.leaf_splits import find_splits
from autopar.tracing import trace
from autopar.tracing.leaves.tensors import show_leaf_tensors

ROWS = 4


def made(forward):
    """A module with a weight and a buffer, whose forward is `forward(module, x)`."""

    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(9.0).view(3, 3) / 9)
            self.register_buffer("seen", torch.ones(3))

    Leaf.forward = forward
    return Leaf()


def recurrence(self, x):
    state, states = x.new_zeros(x.shape[0], 3) + torch.zeros(x.shape[0], 3), []
    for t in range(x.shape[1]):
        state = torch.tanh(x[:, t] @ self.weight + state * self.seen)
        states.append(state)
    return torch.stack(states, 1)


def folded(self, x):
    rows, length, width = x.shape
    return (x.reshape(rows * length, width) @ self.weight).view(rows, length, -1)


def in_place(self, x):
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        out[:, t] = x[:, t] @ self.weight
    return out


APART = {
    "recurrence": recurrence,
    "folded": folded,
    "in place": in_place,
    "two results": lambda self, x: (x @ self.weight, x.sum((1, 2))),
    "time in front and back": lambda self, x: (x.transpose(0, 1) @ self.weight).transpose(0, 1),
    "another's dtype": lambda self, x: (x.double() @ self.weight.double()).type_as(x),
    "softmax over time": lambda self, x: x.softmax(1) * self.weight[0],
}
TOGETHER = {
    "mean of rows": lambda self, x: x - x.mean(0),
    "sum over all": lambda self, x: (x @ self.weight).sum(),
    "softmax over rows": lambda self, x: x.softmax(0),
    "running sum over rows": lambda self, x: x.cumsum(0),
    "rows turned round": lambda self, x: x.flip(0),
    "the number of rows as a factor": lambda self, x: x * x.shape[0],
    "the number of each row": lambda self, x: x + torch.arange(x.shape[0])[:, None, None],
    "so many rows and no others": lambda self, x: x.reshape(ROWS, 6) @ torch.ones(6, 6),
    "rows and time exchanged": lambda self, x: x.reshape(x.shape[1], x.shape[0], 3).transpose(0, 1),
    "rows in the other order at the end": lambda self, x: (x @ self.weight).transpose(0, 1),
    "the way depends on data": lambda self, x: x if x.sum() > 0 else -x,
    "dropout": lambda self, x: nn.functional.dropout(x, 0.5, training=True),
    "rows against each other": lambda self, x: torch.einsum("btd,ctd->bc", x, x),
    "normal over the batch": lambda self, x: nn.functional.batch_norm(x, None, None, training=True),
}


def split_of(forward):
    leaf = made(forward)
    examples = torch.randn(ROWS, 2, 3)
    traced = trace(nn.Sequential(leaf), {"input": examples}, module_leaves=lambda module, path: path == "0")
    show_leaf_tensors(traced)
    find_splits(traced.graph)
    (call,) = [node.target for node in traced.graph.nodes if isinstance(node.target, LeafCall)]
    return leaf, call


def halves(leaf, x):
    """The results on the whole batch, and those on its two halves concatenated along dim 0."""
    results = [leaf(part) for part in (x, *x.chunk(2))]
    whole, *parts = [r if isinstance(r, tuple) else (r,) for r in results]
    return whole, [torch.cat(pair) if pair[0].dim() else pair[0] for pair in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", APART)
def test_rows_apart_are_split(name):
    leaf, call = split_of(APART[name])
    inputs, _, outputs = call.rule.partition(" -> ")
    assert inputs == "_ _, _, b _ _" and all(text.startswith("b") for text in outputs.split(", "))
    whole, together = halves(leaf, torch.randn(ROWS, 2, 3))
    assert all(map(torch.allclose, whole, together))


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_together_are_not(name):
    leaf, call = split_of(TOGETHER[name])
    assert call.rule is None and call.whole
    torch.manual_seed(0)
    try:
        whole, together = halves(leaf, torch.randn(ROWS, 2, 3))
    except RuntimeError:
        return  # it accepts no other number of rows
    assert not all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(whole, together, strict=True))


def test_an_option_of_the_module_decides():
    class Leaf(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.dim = dim

        def forward(self, x):
            return x.softmax(self.dim)

    model = nn.Sequential(Leaf(1), Leaf(0), Leaf(1))
    traced = trace(model, {"input": torch.randn(ROWS, 2, 3)}, module_leaves=lambda module, path: path != "")
    show_leaf_tensors(traced)
    find_splits(traced.graph)
    rules = [node.target.rule for node in traced.graph.nodes if isinstance(node.target, LeafCall)]
    assert rules == ["b _ _ -> b _ _", None, "b _ _ -> b _ _"]


def test_a_leaf_that_remembers_is_not_split():
    def remembers(self, x):
        self.seen.add_(1)
        return x * self.seen

    assert "writes into what outlives it" in split_of(remembers)[1].whole
