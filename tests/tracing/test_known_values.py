"""Known values decide branches as in eager mode, and are guarded; unknown ones take the library's export path."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    IDS,
    MASK,
    TEXT,
    acts_then_asserts,
    asserts_a_branch,
    asserts_a_number,
    asserts_a_tensor,
    asserts_the_opposite,
    branches_then_asserts,
    gpt2,
    llama,
    t5,
)
from torch import nn

from autopar.errors import InputError
from autopar.tracing import TraceError, UnknownDataError, known, trace


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_decoder_without_a_mask_is_causal_by_flag(make):
    graph = trace(make(), dict(input_ids=IDS)).graph
    calls = [n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert calls and all(n.kwargs["is_causal"] and n.kwargs["attn_mask"] is None for n in calls)


def test_a_known_mask_decides_the_branch_and_guards_it():
    model = llama()
    traced = trace(model, dict(input_ids=IDS, attention_mask=known(torch.ones_like(IDS))))
    assert all(n.kwargs["attn_mask"] is None for n in traced.graph.nodes if "scaled_dot" in str(n.target))
    traced.bind((), dict(input_ids=IDS, attention_mask=torch.ones_like(IDS)))
    with pytest.raises(InputError, match="masking_utils"):
        traced.bind((), dict(input_ids=IDS, attention_mask=MASK))


def test_an_unknown_mask_takes_the_librarys_data_free_path_only_where_it_is_needed():
    graph = trace(t5(), {**TEXT, "attention_mask": MASK}).graph
    assert any("attention_mask" in [i.name for i in n.all_input_nodes] for n in graph.nodes)
    assert torch.compiler.is_exporting() is False


class Checked(nn.Module):
    """A library's validation of its inputs, which is assumed to pass while tracing."""

    def forward(self, x):
        torch._check_tensor_all((x > 0) | (x <= 0), lambda: "not a number")
        torch._check_with(ValueError, (x.sum() > -1e9).item(), lambda: "too small")
        return x * 2


def test_checks_of_unknown_data_are_believed():
    x = torch.randn(3)
    assert torch.equal(trace(Checked(), dict(x=x)).gm(x), x * 2)


class Dropping(torch.nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear, self.probability = torch.nn.Linear(3, 3), probability

    def forward(self, x):
        return x if torch.rand([]) < self.probability else self.linear(x)


@pytest.mark.parametrize(("probability", "drops"), [(0, False), (0.0, False), (1, True), (1.5, True), (-1, False)])
def test_a_draw_against_a_sure_probability_has_an_answer(probability, drops):
    traced = trace(Dropping(probability), dict(x=torch.randn(2, 3)))
    assert drops == ("linear" not in str(traced.graph))


class Adapted(torch.nn.Module):
    """Like adapters of peft, whose dropout rate is 0 by default."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear, self.probability = torch.nn.Linear(3, 3), probability

    def forward(self, x):
        if self.training and torch.rand(1) > self.probability:
            x = self.linear(x)
        return torch.where(torch.rand(3) > self.probability, x, -x)


def test_a_draw_beyond_a_chance_of_0_is_beyond_it():
    traced = trace(Adapted(0.0), dict(x=torch.randn(2, 3)))
    assert "linear" in str(traced.graph) and "where" in str(traced.graph)  # many draws: one of them may be 0
    with pytest.raises(TraceError, match="random number"):
        trace(Adapted(0.5), dict(x=torch.randn(2, 3)))


def test_an_open_draw_is_refused_as_random():
    with pytest.raises(TraceError, match="random number"):
        trace(Dropping(0.1), dict(x=torch.randn(2, 3)))


def test_a_draw_that_was_written_is_no_longer_between_0_and_1():
    def scaled(x):
        draw = torch.rand(())
        draw.view(1).mul_(3)
        return x if draw < 1 else -x

    with pytest.raises(TraceError):
        trace(scaled, dict(x=torch.randn(2)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_is_traced_without_its_kernel(reduction):
    def loss(logits, targets):
        lengths = torch.full((2,), 6), torch.full((2,), 3)
        return torch.nn.functional.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction=reduction)

    logits, targets = torch.randn(6, 2, 5), torch.randint(1, 5, (2, 3))
    traced = trace(loss, dict(logits=logits, targets=targets))
    assert torch.equal(traced.gm(logits, targets), loss(logits, targets))
    assert next(n for n in traced.graph.nodes if n.target is torch.nn.functional.ctc_loss).meta["val"].shape == (
        (2,) if reduction == "none" else ()
    )


@pytest.mark.parametrize("function", [asserts_a_tensor, asserts_a_number, asserts_the_opposite, branches_then_asserts])
def test_what_is_asserted_of_unknown_data_is_believed(function):
    traced = trace(function, dict(x=torch.randn(3)))
    assert torch.equal(traced.gm(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize("function", [acts_then_asserts, asserts_a_branch])
def test_other_questions_beside_an_assertion_are_refused(function):
    with pytest.raises(TraceError):
        trace(function, dict(x=torch.randn(3)))


class ByLanguage(torch.nn.Module):
    """As in Xmod: an adapter for each language, applied to the rows of a known mask."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, languages):
        made = torch.zeros_like(x)
        for number, adapter in enumerate(self.adapters):
            mask = languages == number
            made[mask] = adapter(x[mask])
        return made + x


def test_a_known_mask_picks_a_known_number_of_elements_which_is_guarded():
    model, x = ByLanguage(), torch.randn(5, 3, 4)
    traced = trace(model, dict(x=x, languages=known(torch.tensor([0, 1, 1, 0, 0]))), bias_addition_split=False)
    alike = torch.tensor([1, 0, 0, 1, 0])
    assert torch.equal(traced.gm(*traced.bind((x, alike))), model(x, alike))
    with pytest.raises(InputError, match="3, but for this input it is 1"):
        traced.bind((x, torch.tensor([0, 1, 1, 1, 2])))


def test_an_unknown_mask_is_refused():
    with pytest.raises(UnknownDataError, match="linear is given rows that a mask picked"):
        trace(ByLanguage(), dict(x=torch.randn(5, 3, 4), languages=torch.tensor([0, 1, 1, 0, 0])))


def test_vmap_in_vmap_is_recorded_once():
    class Banded(torch.nn.Module):
        def forward(self, x):
            def near(i, j):
                return i.new_ones((), dtype=torch.bool) & ((i - j) >= 0) & ((i - j) < 3)

            places = torch.arange(x.shape[1])
            rows = torch.vmap(near, in_dims=(None, 0))
            return x @ torch.vmap(rows, in_dims=(0, None))(places, places).to(x.dtype)

    x = torch.randn(2, 7)
    assert torch.equal(trace(Banded(), dict(x=x)).gm(x), Banded()(x))


def test_what_distributions_check_of_their_parameters_is_believed():
    class Surprise(torch.nn.Module):
        def forward(self, logits):
            return torch.distributions.Categorical(logits=logits).entropy()

    logits = torch.randn(3, 5)
    before = torch.distributions.Distribution._validate_args
    assert torch.equal(trace(Surprise(), dict(logits=logits)).gm(logits), Surprise()(logits))
    assert torch.distributions.Distribution._validate_args is before


@pytest.mark.parametrize(
    "make",
    [
        torch.ones_like,
        lambda x: torch.zeros_like(x, dtype=torch.long) + 1,
        lambda x: torch.full_like(x[:, 0], True, dtype=torch.bool),
        lambda x: x.new_ones(2, 3),
        lambda x: x.new_full((3,), 1.0, device=x.device),
        lambda x: x.new_tensor([1, 2]),
        lambda x: torch.linspace(1, 2, 3, dtype=torch.float64).to(x),
        lambda x: torch.arange(1, 4).type_as(x),
        lambda x: torch.arange(2).to(x) + 1 if torch.arange(1, 3).to(x).all() else x,  # the second like the first
    ],
)
def test_what_is_filled_in_the_shape_of_unknown_data_is_known(make):
    def masked(x):
        return x if make(x).all() else x * 2

    x = torch.randn(2, 3)
    traced = trace(masked, dict(x=x))
    assert torch.equal(traced.gm(x), x) and not traced.reads_values


@pytest.mark.parametrize(
    "make", [lambda x: x.new_full((3,), x.sum()), lambda x: x.new_tensor([x.sum()]), lambda x: x.to(torch.ones(3))]
)
def test_what_is_filled_from_unknown_data_is_not_known(make):
    def masked(x):
        return x if make(x).all() else x * 2

    with pytest.raises((UnknownDataError, TraceError)):
        trace(masked, dict(x=torch.randn(3)))


def test_the_like_of_a_transposed_tensor_lies_as_it_does() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten() * torch.ones_like(x.t()).t().view(-1)

    x = torch.randn(3, 4)
    found = trace(Masked(), {"x": x})
    torch.testing.assert_close(found.gm(x), x.flatten())
