"""What forward puts into lists, dicts and sets of its modules is removed after a trace."""

import collections
import copy
import warnings

import pytest
import torch
from torch import nn

from autopar.tracing import trace


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tables = nn.Linear(2, 2), dict[int, torch.Tensor]()

    def forward(self, x):
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1])
        return self.layer(x) + self.tables[x.shape[1]][:, None]


def test_a_table_for_each_length_is_made_in_each_trace():
    model, x = ByLength(), torch.randn(3, 4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = trace(model, dict(x=x))
    assert not model.tables and not traced.plain_values.on(model)()
    assert torch.equal(traced.gm(x), model(x)) and [*model.tables] == [4]


def test_what_python_asks_of_a_module_that_is_copied_is_no_value_of_it():
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return copy.copy(self.layer)(x)

    model = Copying()
    traced = trace(model, dict(x=torch.randn(3, 2)))
    assert not traced.plain_values.on(copy.deepcopy(model))()


def test_containers_are_as_they_were():
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lists = nn.Linear(2, 2), {"inner": [1]}
            self.last, self.kinds = collections.deque([1, 2], maxlen=2), {1}

        def forward(self, x):
            y = self.layer(x)
            self.lists["inner"].append(y)
            self.lists["more"] = y
            self.last.append(y)
            self.kinds.add(2)
            return y

    model = Filling()
    inner = model.lists["inner"]
    with pytest.warns(UserWarning, match=r"forward sets lists \(changed in place"):
        trace(model, dict(x=torch.randn(3, 2)))
    assert model.lists == {"inner": [1]} and model.lists["inner"] is inner
    assert [*model.last] == [1, 2] and model.kinds == {1}


class Pair(tuple):
    """A tuple that refuses to be counted, as `Irrep` of e3nn does."""

    def __len__(self):
        raise NotImplementedError


class WithPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.pair = Pair((3, Pair(([self.layer.weight],))))

    def forward(self, x):
        factor, (weights,) = self.pair
        return self.layer(x) * factor + weights[0].sum()


def test_containers_that_cannot_be_counted_are_looked_into():
    model, x = WithPairs(), torch.randn(3, 2)
    traced = trace(model, dict(x=x))
    assert torch.equal(traced.gm(x), model(x))
    assert not traced.plain_values.on(model)()
    model.pair = Pair((4, model.pair[1]))
    assert traced.plain_values.on(model)()
