"""Code that has no graph is refused with the user's line and what to write instead."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence

from autopar import Cluster, plan
from autopar.errors import UntraceableError
from autopar.planning.leaf_requests import LeafWarning

X, IDS = torch.ones(8, 4, 16), torch.zeros(8, 4, dtype=torch.long)


class Net(nn.Module):
    def __init__(self, way: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Embedding(32, 16, max_norm=1.0), nn.Parameter(torch.ones(16), requires_grad=False)
        self.bag, self.linear, self.lstm = nn.EmbeddingBag(32, 16, max_norm=1.0), nn.Linear(16, 4), nn.LSTM(16, 4)
        self.register_buffer("seen", torch.zeros(16))
        self.way = way

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean() + self.way(self, x, ids).mean()


def clamped(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    net.linear.weight.data.clamp_(-1, 1)
    return x


def averaged(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    net.frozen.mul_(0.9).add_(x.mean((0, 1)))
    return x * net.frozen


def counted(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.bincount(ids.flatten())[ids].float()


def packed(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return net.lstm(pack_padded_sequence(x, ids[:, 0] + 1, batch_first=True))[1][0]


def in_numpy(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


def bound_anew(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    net.seen = 0.9 * net.seen + 0.1 * x.detach().mean((0, 1))
    return x * 2 if x.sum() > 0 else x - net.seen


def picked(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x[..., 0].masked_select(ids > 0).view(16)


def drawn(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * 2 if random.random() < 0.5 else x


def drawn_by_name(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x * uniform(0.0, 1.0)


def drawn_by_numpy(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x[:, np.random.permutation(4)]  # noqa: NPY002 (it is what scripts have)


def hooked(net: Net, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = net.linear(x)
    scores.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return scores


@pytest.mark.filterwarnings("error::autopar.planning.leaf_requests.LeafWarning")
@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lambda net, x, ids: net.embed(ids), r"embedding with max_norm=1.0 writes .*after each optimizer.step\(\)"),
        (lambda net, x, ids: net.bag(ids), r"embedding_bag with max_norm=1.0 writes into its weight"),
        (
            lambda net, x, ids: F.embedding(ids, net.linear.weight, sparse=True),
            r"embedding with sparse=True has sparse gradients.*: build it with sparse=False",
        ),
        (
            lambda net, x, ids: F.embedding_bag(ids % 4, net.linear.weight, sparse=True),
            r"embedding_bag with sparse=True has sparse gradients",
        ),
        (clamped, r"forward writes into the parameter 'linear.weight': write after optimizer.step\(\)"),
        (averaged, r"forward writes into the parameter 'frozen'.* make it a buffer"),
        (counted, r"the number of bins of bincount\(\) depends on.*give their number, minlength=N"),
        (packed, r"pack_padded_sequence\(\) depends on the lengths.*run the recurrent layer on the padded batch"),
        (drawn, r"draws a number by random\(\) of Python or numpy.*draw with torch.rand"),
        (drawn_by_name, r"draws a number by uniform\(\)"),
        (drawn_by_numpy, r"draws a number by permutation\(\)"),
        (hooked, r"register_hook\(\) in forward.* torch.autograd.Function"),
        (
            bound_anew,
            r"bool\(\) asks for the contents.*Nor can it run as one op: bound_anew binds 'seen' to another tensor",
        ),
        (
            picked,
            r"^UnknownDataError: view is given rows that a mask picked.*give 'ids' a known example(?!.*one op.*one op)",
        ),
        (in_numpy, r"in_numpy \(function\) cannot be traced.*numpy\(\) asks for the contents.*a known example"),
    ],
)
def test_the_line_and_what_to_write(way: Callable[..., torch.Tensor], words: str) -> None:
    with pytest.raises((UntraceableError, LeafWarning)) as refused:  # functions may become leaves, with a warning
        plan(Net(way), {"x": X, "ids": IDS}, Cluster.preset("cpu", shape=(2,)))
    text = str(refused.value)
    assert re.search(words, text), text
    lines = [int(n) for n in re.findall(r"test_refused\.py:(\d+)", text)]
    code = way.__code__
    own = range(code.co_firstlineno, code.co_firstlineno + 4)
    assert any(n in own for n in lines), f"{lines} are not in {own}: {text}"


def _shared() -> nn.Module:
    linear = nn.Linear(16, 16)
    return nn.Sequential(linear, nn.Linear(16, 8), nn.Sequential(linear))


@pytest.mark.parametrize(
    ("model", "loss", "where"),
    [
        (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(8, 4)), None, r"2 \(Linear\)"),
        (nn.Sequential(nn.Sequential(nn.Linear(12, 4))), None, r"0\.0 \(Linear\)"),
        (_shared(), None, r"0 or 2\.0 \(Linear\)"),
        (nn.Linear(12, 4), None, "the root module"),
        (Net(lambda net, x, ids: net.linear(x[..., 1:])), None, r"linear \(Linear\), .*test_refused\.py:\d+"),
        (Net(lambda net, x, ids: x @ x), None, r"the root module, .*test_refused\.py:\d+"),
        (nn.Linear(16, 4), lambda out: nn.MSELoss()(out, X), r"MSELoss, .*test_refused\.py:\d+"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_where_shapes_do_not_fit(model: nn.Module, loss: Callable[..., torch.Tensor] | None, where: str) -> None:
    """The error is raised in torch's layers, at no line of the user's code."""
    examples = {"x": X, "ids": IDS} if isinstance(model, Net) else {"input": X}
    with pytest.raises(UntraceableError, match=rf"the model's forward raised RuntimeError.* \[at {where}\]$"):
        plan(model, examples, Cluster.preset("cpu", shape=(2,)), loss_fn=loss)


def test_hooks_that_calls_do_not_run_are_told() -> None:
    """Hooks of the user's own code cause a warning; pruning is a hook of an installed package."""
    net, seen = Net(lambda net, x, ids: x), list[torch.Tensor]()
    net.linear.register_forward_hook(lambda module, args, output: seen.append(output))
    net.bag.register_forward_pre_hook(lambda module, args: None)
    prune.identity(net.embed, "weight")
    with pytest.warns(UserWarning, match="forward hooks of bag, linear run now, while the model is traced"):
        plan(net, {"x": X, "ids": IDS}, Cluster.preset("cpu", shape=(2,)))
