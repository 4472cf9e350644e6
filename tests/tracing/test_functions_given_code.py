"""An autograd function whose backward would run a module of the model is refused: a plan has other parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import UntraceableError
from autopar.tracing import trace

Tensor = torch.Tensor
BY_NAME: dict[str, nn.Module] = {}


class Again(torch.autograd.Function):
    """Runs the function or module it is given, and again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = BY_NAME[run] if isinstance(run, str) else run
        ctx.save_for_backward(x)
        found: Tensor = ctx.run(x)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(grad)
        return None, x.grad


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind
        BY_NAME["second"] = self.second

    def forward(self, x: Tensor) -> Tensor:
        given = {"module": self.second, "lambda": lambda y: self.second(y), "name": "second", "method": self.again}
        return Again.apply(given[self.kind], self.first(x)).sum()

    def again(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(x)
        return found


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("module", "is given a Linear"),
        ("lambda", "is given a function"),
        ("method", "is given a method"),
        ("name", "reads 'second.weight', which it is not given"),
    ],
)
@pytest.mark.parametrize("unsupported", ["raise", "leaf"])
def test_code_of_the_model_is_refused(kind: str, fault: str, unsupported: Any) -> None:
    x = torch.randn(2, 4)
    assert Net(kind)(x).isfinite()
    words = rf"Again {fault}: its backward would read .*torch.utils.checkpoint.*test_functions_given_code\.py:\d+"
    with pytest.raises(UntraceableError, match=words):
        trace(Net(kind), {"x": x}, unsupported=unsupported)


def test_parameters_that_it_is_given_are_none_of_it() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(x, self.weight).sum()

    model, x = Scaling(), torch.randn(2, 4)
    torch.testing.assert_close(trace(model, {"x": x}).gm(x), model(x))
