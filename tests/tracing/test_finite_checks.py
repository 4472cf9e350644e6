"""Checks of activations for infinities and NaN: the graph handles them too, or the trace reports its assumption."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import DetrConfig, ResNetConfig

from autopar.tracing import UnknownDataError, trace


class Checking(nn.Module):
    """A layer that repairs overflows; `check` tells whether its activations are fine."""

    def __init__(self, check):
        super().__init__()
        self.linear, self.check = nn.Linear(4, 4), check

    def forward(self, x):
        hidden = self.linear(x)
        if self.check(hidden):
            return hidden.relu()
        return hidden.clamp(-1, 1)


CHECKS = {
    "isfinite.all": lambda h: torch.isfinite(h).all(),
    "all(isfinite)": lambda h: torch.all(h.isfinite()),
    "not isinf.any": lambda h: not torch.isinf(h).any(),
    "isinf or isnan": lambda h: not (torch.isinf(h).any() or torch.isnan(h).any()),
    "isinf | isnan": lambda h: not (torch.isinf(h) | torch.isnan(h)).any().item(),
    "negated": lambda h: (~h.isnan()).all() and torch.logical_not(h.isinf()).all(),
    "and": lambda h: torch.logical_and(h.isfinite(), ~h.isnan()).all().item(),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_activations_is_answered_as_for_finite_ones(name):
    model, x = Checking(CHECKS[name]), torch.randn(2, 4)
    with pytest.warns(UserWarning, match="assumed to be finite at .*test_finite_checks.py"):
        traced = trace(model, dict(x=x))
    assert torch.equal(traced.gm(x), model(x)) and traced.find("relu") and not traced.find("clamp")
    assert traced.assumptions and all("test_finite_checks.py" in place for place in traced.assumptions)


@pytest.mark.parametrize(
    "check",
    [
        lambda h: (h > 0).all(),  # not a check for infinities
        lambda h: (torch.isfinite(h) & (h > 0)).all(),  # combined with another condition
        lambda h: torch.isfinite(h).logical_and_(h > 0).all(),  # overwritten in place by another condition
    ],
)
def test_other_questions_are_refused(check):
    with pytest.raises(UnknownDataError, match="contents"):
        trace(Checking(check), dict(x=torch.randn(2, 4)))


def test_missing_values_in_an_input_are_no_overflow():
    def filled(x):
        return x.nan_to_num(0.0) if torch.isnan(x).any() else x * 2

    with pytest.raises(UnknownDataError, match="contents"):
        trace(filled, dict(x=torch.randn(3)))


def test_a_choice_that_stays_in_the_graph_is_made_by_data():
    def chosen(x):
        hidden = x * 2
        return torch.where(torch.isinf(hidden).any(), torch.zeros_like(hidden), hidden)

    traced = trace(chosen, dict(x=torch.randn(3)))
    assert traced.assumptions == ()
    assert traced.gm(torch.tensor([1.0, float("inf")])).tolist() == [0.0, 0.0]


EDGE = torch.finfo(torch.float32).max - 1000


class Mending(nn.Module):
    """Repairs overflows as DETR's layers do: `most` is the clamp's bound, `more` adds another op."""

    def __init__(self, most=EDGE, more=False):
        super().__init__()
        self.linear, self.most, self.more = nn.Linear(4, 4), most, more

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
            if not torch.isfinite(x).all():
                x = torch.clamp(x, min=-self.most, max=self.most)
                x = x * 2 if self.more else x
        return x


@pytest.mark.parametrize("overflows", [False, True])
def test_clamps_at_the_edge_of_the_dtype_stay_in_the_graph(overflows):
    torch.manual_seed(0)
    model, x = Mending(), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = trace(model, dict(x=x))
    assert traced.assumptions == () and len(traced.find("clamp")) == 2
    x[0, 0] = 3e38 if overflows else 1.0
    model.linear.weight.data[:, 0] = 2.0
    assert torch.isfinite(model.linear(x)).all() != overflows
    mine, theirs = traced.gm(x), model(x)
    assert torch.equal(mine, theirs)
    gradients = [torch.autograd.grad(out.sum(), [*model.parameters()]) for out in (mine, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("model", [Mending(most=1e6), Mending(more=True)], ids=["changes finite values", "does more"])
def test_other_mends_are_not_in_the_graph(model):
    with pytest.warns(UserWarning, match="assumed to be finite"):
        traced = trace(model, dict(x=torch.randn(2, 4)))
    assert traced.assumptions and not traced.find("clamp") and not traced.find("mul")


def test_detr_in_training_mode_is_traced_whole():
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = DetrConfig(
        d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, num_queries=3, backbone_config=backbone, use_timm_backbone=False,
        use_pretrained_backbone=False, dropout=0.0,
    )  # fmt: skip
    model, pixels = transformers_model(config), torch.randn(1, 3, 64, 64)
    traced = trace(model, dict(pixel_values=pixels))
    assert traced.assumptions == () and len(traced.find("clamp")) == config.encoder_layers
    assert not [n for n in traced.graph.nodes if n.op == "call_module"]
    torch.manual_seed(1)
    expected = model(pixel_values=pixels).last_hidden_state
    torch.manual_seed(1)
    assert torch.equal(traced.gm(*traced.bind(kwargs=dict(pixel_values=pixels))).last_hidden_state, expected)


def transformers_model(config):
    from transformers import DetrModel

    torch.manual_seed(0)
    return DetrModel(config).train()
