"""Dims that are proved free may change between calls; errors name what fixes a dim."""

from __future__ import annotations

import pytest
import torch
from tiny_models import IDS, TEXT, bert, gpt2, llama, tensors
from torch import nn

from autopar.errors import InputError
from autopar.tracing import TraceError, trace


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_batch_and_sequence_of_a_language_model_are_free(make):
    model = make().eval()
    traced = trace(model, TEXT, bias_addition_split=False, prove_sizes=True)
    assert set(traced.inputs.sizes.group) == {(name, dim) for name in TEXT for dim in (0, 1)}
    for shape in ((5, 11), (1, 7), (3, 2)):
        ids = torch.randint(3, 90, shape)
        call = dict(input_ids=ids, labels=ids)
        for a, b in zip(tensors(traced.gm(*traced.bind((), call))), tensors(model(**call)), strict=True):
            assert torch.equal(a, b)


def test_dims_that_were_equal_stay_equal():
    traced = trace(gpt2(), TEXT, prove_sizes=True)
    with pytest.raises(InputError, match="labels"):
        traced.bind((), dict(input_ids=IDS, labels=IDS[:, :5]))


class Unrolled(nn.Module):
    def forward(self, x):
        state = x[:, 0] * 0
        for t in range(x.shape[1]):  # this line fixes dim 1
            state = state + x[:, t]
        return state


def test_a_loop_over_a_dim_fixes_it_and_is_named():
    model = Unrolled()
    traced = trace(model, dict(x=torch.randn(4, 3, 6)), prove_sizes=True)
    assert {dim for _, dim in traced.inputs.sizes.group} == {0, 2}
    x = torch.randn(9, 3, 2)
    assert torch.equal(traced.gm(*traced.bind((x,))), model(x))
    with pytest.raises(InputError, match=r"test_free_sizes\.py:"):
        traced.bind((torch.randn(4, 5, 6),))


def test_a_dim_that_meets_a_weight_is_fixed():
    traced = trace(nn.Linear(6, 2), dict(input=torch.randn(4, 6)), prove_sizes=True)
    assert set(traced.inputs.sizes.group) == {("input", 0)}
    with pytest.raises(InputError, match="input"):
        traced.bind((torch.randn(4, 5),))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Unrolled()
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.cell(x))


def test_a_loop_that_makes_the_graph_too_long_is_one_leaf():
    model, x = Recurrent(), torch.randn(2, 400, 6)
    with pytest.warns(UserWarning, match="Unrolled"):
        traced = trace(model, dict(x=x), bias_addition_split=False, max_nodes=100)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["cell"]
    assert torch.equal(traced.gm(x), model(x))
    assert len(trace(model, dict(x=x)).graph.nodes) > 800


CALLS: list[nn.Module] = []


class Remembering(nn.Module):
    """A recurrence that appends its last state to a list besides returning a result, as models with caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, x, states):
        CALLS.append(self)
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(self.cell(x[:, t]) + state)
        states.append(state.clone())
        return state


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Remembering()

    def forward(self, x):
        states = []
        return self.mixer(x, states), *states


def test_a_loop_whose_cache_no_node_holds_is_refused_without_running_the_whole_model_as_a_leaf():
    model = Caching()
    CALLS.clear()
    with pytest.warns(UserWarning, match="Remembering"), pytest.raises(TraceError, match="train without caches"):
        trace(model, dict(x=torch.randn(2, 400, 6)), unsupported="leaf", max_nodes=100)
    assert len(CALLS) == 2, "once to be unrolled, once as a leaf"
