"""`torch.cov` and `torch.corrcoef` are traced as their component ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.tracing import trace

CLOSE = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
DTYPES = [torch.float64, torch.complex128, torch.int64]


class Applied(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, counts=None, weights=None):
        return self.function(x, counts, weights)


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 9, shape) if dtype == torch.int64 else torch.randn(shape, dtype=dtype)


def result_and_gradients(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in given]
    result = function(*given)
    asked = [t for t in given if t.requires_grad]
    factors = torch.arange(1.0, 1 + result.numel()).view(result.shape)
    loss = (result.abs().square() * factors).sum()
    return [result, *(torch.autograd.grad(loss, asked) if asked else ())]


def equal(function: Callable[..., torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    model = Applied(function)
    traced, tensors = trace(model, given), list(given.values())
    assert not {"cov", "corrcoef"} & {getattr(n.target, "__name__", n.target) for n in traced.graph.nodes}
    whole = result_and_gradients(lambda *values: model(**dict(zip(given, values, strict=True))), tensors)
    for mine, right in zip(result_and_gradients(traced.gm, tensors), whole, strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine, right, **CLOSE)


@pytest.mark.parametrize("weighted", ["", "counts", "weights", "counts weights"])
@pytest.mark.parametrize("correction", [1, 0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 7), (1, 7), (7,)], ids=str)
def test_covariances(shape, dtype, correction, weighted):
    drawn = {"counts": torch.randint(1, 4, shape[-1:]), "weights": 0.5 + torch.rand(shape[-1:], dtype=torch.float64)}
    given = {"x": rows(shape, dtype)} | {name: drawn[name] for name in weighted.split()}
    equal(lambda x, c, w: torch.cov(x, correction=correction, fweights=c, aweights=w), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 7), (1, 7), (7,)], ids=str)
def test_correlations(shape, dtype):
    equal(lambda x, c, w: x.corrcoef(), {"x": rows(shape, dtype)})


@pytest.mark.filterwarnings("ignore:cov:UserWarning")
@pytest.mark.parametrize("shape", [(3, 1), ()], ids=str)
def test_too_few_observations(shape):
    equal(lambda x, c, w: x.cov(correction=2), {"x": rows(shape, torch.float64)})


def test_the_number_of_observations_may_change():
    model, x = Applied(lambda x, c, w: torch.cov(x.t())), rows((8, 3), torch.float64)
    traced = trace(model, {"x": x}, prove_sizes=True)
    assert ("x", 0) in traced.inputs.sizes.group
    torch.testing.assert_close(traced.gm(x[:5]), model(x[:5]), **CLOSE)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_symbol_for_a_size(dim):
    x = rows((8, 3), torch.float64)
    traced = trace(Applied(lambda x, c, w: torch.cov(x)), {"x": x}, dynamic_shapes={"x": {dim: "n"}})
    torch.testing.assert_close(traced.gm(x), torch.cov(x), **CLOSE)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, c, w: torch.cov(x.view(2, 3, 4)), "two or fewer dimensions"),
        (lambda x, c, w: torch.cov(x > 0), "bool"),
        (lambda x, c, w: torch.cov(x, aweights=x[0, :2]), "same numel"),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(function, words):
    with pytest.raises(RuntimeError, match=words):
        trace(Applied(function), {"x": rows((4, 6), torch.float64)})
