"""Rows selected by a mask of unknown contents: op by op in the graph, with the values and gradients of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from picked_cases import NOT_TOLD, PICKED, Model, batch

from autopar import AutoparWarning
from autopar.tracing import trace
from autopar.tracing.errors import UnknownDataError


@pytest.mark.parametrize("kind", PICKED)
def test_values_and_gradients_are_those_of_eager(kind: str) -> None:
    torch.manual_seed(0)
    model, first = Model(PICKED[kind]), batch(0)
    first["x"].requires_grad_()
    traced = trace(model, first)
    assert not traced.failures
    for seed in range(4):
        made = []
        for run in (traced.gm, model):
            given = batch(seed)
            given["x"].requires_grad_()
            out = run(**given)
            inputs = (given["x"], model.w, model.v)
            made.append([out, *torch.autograd.grad(out, inputs, allow_unused=True, materialize_grads=True)])
        torch.testing.assert_close(*made, rtol=1e-11, atol=1e-12, equal_nan=True)
        assert kind in ("a mask of all dims", "none picked") or made[0][0].isfinite()


class Keeping(Model):
    """A model that stores the selected rows."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.rows = x[labels >= 0]
        return (self.rows @ self.w).sum()


def test_rows_that_a_module_keeps_are_named() -> None:
    with pytest.warns(AutoparWarning, match="forward sets rows"):
        trace(Keeping(PICKED["mean"]), batch(0))


def test_under_autocast() -> None:
    def loss(x: torch.Tensor, labels: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(F.linear(x.float()[labels >= 0], w.float()), labels[labels >= 0])

    model = Model(loss)
    traced = trace(model, batch(0))
    torch.testing.assert_close(traced.gm(**batch(1)), model(**batch(1)))


def test_rows_are_tensors_to_who_asks() -> None:
    def as_tensors(x: torch.Tensor, labels: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = x[labels >= 0]
        assert torch.is_tensor(rows) and not isinstance(rows, torch.nn.Parameter)
        losses = {"rows": (rows @ w).square(), "count": rows.shape[0]}
        return sum(one.mean() for one in losses.values() if isinstance(one, torch.Tensor))

    model = Model(as_tensors)
    torch.testing.assert_close(trace(model, batch(0)).gm(**batch(1)), model(**batch(1)))


def test_other_counts_than_the_call_says_are_an_error() -> None:
    for told in (
        lambda x, labels, w, v: F.cross_entropy(x[labels >= 0], torch.zeros(8, dtype=torch.long)),
        lambda x, labels, w, v: x[labels >= 0].view(4, 2, 5).sum(),
    ):
        given = batch(1)
        traced = trace(Model(told), given)
        given["labels"][:] = torch.where(torch.arange(6) < 2, 0, -100)
        torch.testing.assert_close(traced.gm(**given), Model(told)(**given))
        for other in (torch.where(torch.arange(6) < 3, 0, -100), torch.where(torch.arange(6) < 1, 0, -100)):
            given["labels"][:] = other
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                traced.gm(**given)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_a_mask_of_bytes() -> None:
    model = Model(
        lambda x, labels, w, v: (x[(labels >= 0).byte()] * v).sin().sum() + x[:, (labels[0] > 0).byte()].sum()
    )
    traced = trace(model, batch(0))
    torch.testing.assert_close(traced.gm(**batch(1)), model(**batch(1)))


def test_code_that_takes_tensors_alone() -> None:
    def mapped(x: torch.Tensor, labels: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.sin)(x[labels >= 0]).sum()

    with pytest.raises(UnknownDataError, match=r"torch.func.vmap is given rows that a mask picked"):
        trace(Model(mapped), batch(0))
    traced = trace(Model(mapped), batch(0), unsupported="leaf")
    assert not traced.find("sin")
    torch.testing.assert_close(traced.gm(**batch(1)), Model(mapped)(**batch(1)))


@pytest.mark.parametrize("kind", NOT_TOLD)
def test_what_only_the_picked_rows_can_tell(kind: str) -> None:
    with pytest.raises(
        UnknownDataError,
        match=r"(depends on data|is needed .*): (write .* -1, or )?give 'labels' a known",
    ):
        trace(Model(NOT_TOLD[kind]), batch(0))
