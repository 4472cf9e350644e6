"""TorchScript functions and modules in a model: traced into if they have Python source, otherwise refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import Made
from torch import nn

from autopar.errors import UntraceableError
from autopar.tracing import trace
from autopar.tracing.errors import UnknownDataError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

Tensor = torch.Tensor


def squashed(x: Tensor, by: float) -> Tensor:
    return (x / by).tanh() * by


def combined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Used in a scan. `addcmul` on data-free tensors gives an empty one, which the graph once contained."""
    return b[0] * a[0], torch.addcmul(b[1], b[0], a[1])


def ways() -> dict[str, Callable[[Tensor], Tensor]]:
    scan, squash = torch.jit.script(combined), torch.jit.script(squashed)
    return {
        "a number": lambda x: squash(x, 5.0),
        "tuples": lambda x: torch.stack(scan((x, x + 1), (x * 2, x.flip(0)))),
        "followed with an example": torch.jit.trace(lambda x: x.tanh() * 2, (torch.randn(4, 3),)),
    }


@pytest.mark.parametrize("name", ["a number", "tuples", "followed with an example"])
def test_a_scripted_function_is_traced_op_by_op_with_the_gradients_of_eager(name: str) -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    way = ways()[name]
    graph = trace(Made(way), {"x": x})
    assert not any("prims" in str(n.target) or "empty" in str(n.target) for n in graph.graph.nodes)
    assert torch.equal(graph.gm(x), way(x))
    mine, its = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (graph.gm, way))
    torch.testing.assert_close(mine, its)  # TorchScript's own formulas round differently


def test_one_without_a_source_says_what_to_call() -> None:
    doubled = torch.jit.CompilationUnit("def doubled(x):\n    return x.tanh() * 2\n").doubled
    with pytest.raises(UnknownDataError, match=r"doubled.*no Python source.*call the function it was made of"):
        trace(Made(lambda x: doubled(x) + 1), {"x": torch.randn(4, 3)})


def test_a_module_of_torch_script_is_refused_with_its_place_and_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(UntraceableError, match=r"module of TorchScript.*use the module that it was made of.*\[at 1\]"):
        trace(model, {"input": torch.randn(2, 3)})
    assert not any(parameter.is_meta for parameter in model.parameters())
