"""Triton kernels wrapped by `torch.library.triton_op`: one node with its own backward; interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.library import triton_op, wrap_triton

from autopar.tracing import trace

triton: Any = pytest.importorskip("triton")
BLOCK = 16


@pytest.fixture
def scaled_sum(monkeypatch: pytest.MonkeyPatch):
    """x * factor + y as a Triton kernel, with its own gradients (times 100, which shows that they are used)."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton.language as tl

    @triton.jit
    def kernel(x, y, out, count, factor, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside)
        tl.store(out + at, total, mask=inside)

    kernel.fn.__globals__["tl"] = tl

    def scaled_sum(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
        out = torch.empty_like(x)
        wrap_triton(kernel)[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), factor, BLOCK)
        return out

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return 100 * grad * ctx.factor, grad, None

    operator = triton_op("autopar_tests::scaled_sum", mutates_args=())(scaled_sum)
    operator.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[2]))
    return operator


class Using(nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.linear, self.operator = nn.Linear(7, 7), operator

    def forward(self, x):
        return self.operator(self.linear(x), x, 3.0).relu()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="`wrap_triton` takes interpreted kernels, which run on the CPU, from torch 2.13 on",
)
def test_a_triton_kernel_is_one_node_with_its_own_backward(scaled_sum: Any) -> None:
    torch.manual_seed(0)
    model, x = Using(scaled_sum), torch.randn(5, 7)
    traced = trace(model, dict(x=x))
    (node,) = (n for n in traced.graph.nodes if "scaled_sum" in str(n.target))
    assert node.meta["val"].shape == (5, 7) and node.meta["val"].requires_grad
    expected = (3.0 * model.linear(x) + x).relu()
    torch.testing.assert_close(traced.gm(x), expected)
    (gradient,) = torch.autograd.grad(traced.gm(x).sum(), model.linear.bias)
    (hundredth,) = torch.autograd.grad(expected.sum(), model.linear.bias)
    torch.testing.assert_close(gradient, 100 * hundredth)
