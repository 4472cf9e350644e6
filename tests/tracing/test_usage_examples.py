"""Usage examples of the tracers that this one follows, in our names, with results compared to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional

from autopar.tracing import RobustTracer, Scope, hf_symbolic_trace, recursive_trace, trace


def _names(traced: Any) -> list[str]:
    calls = (n for n in traced.graph.nodes if n.op.startswith("call"))
    return [n.target if isinstance(n.target, str) else n.target.__name__.strip("_") for n in calls]


class _Branch(nn.Module):
    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        if x1.dim() == 2:
            return x1 @ x2
        return x1 + x2.sum(0)


def test_a_branch_on_the_dim_of_one_of_two_tensors() -> None:
    """From ColoTracer: one data-free argument, and one with data."""
    two = trace(_Branch(), {"x1": torch.empty(3, 4, device="meta"), "x2": torch.ones(4, 5)})
    assert _names(two) == ["matmul"]
    three = trace(_Branch(), {"x1": torch.empty(2, 3, 5, device="meta"), "x2": torch.ones(4, 5)})
    assert _names(three) == ["sum", "add"]
    x1, x2 = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(two.gm(x1, x2), _Branch()(x1, x2))


class _Flag(nn.Module):
    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        return x * 2 if double else x + 1


def test_a_flag_is_fixed_for_good() -> None:
    """The graph has no trace of what the model would do with another value."""
    traced = trace(_Flag(), {"x": torch.empty(3, device="meta")}, concrete_args={"double": True})
    assert [n.name for n in traced.graph.nodes if n.op == "placeholder"] == ["x"]
    x = torch.randn(3)
    assert torch.equal(traced.gm(x), 2 * x) and torch.equal(_Flag()(x, False), x + 1)


class _Nested(nn.Module):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        y: torch.Tensor = batch["words"]["ids"] * batch["scale"]
        return y + batch["words"]["places"] if batch["add"] else y


def test_nested_inputs_some_leaves_of_which_are_fixed() -> None:
    words = {"ids": torch.empty(2, 3), "places": torch.empty(3)}
    traced = trace(_Nested(), {"batch": {"words": words, "scale": 2.0, "add": True}})
    tensors = [n for n in traced.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
    assert len(tensors) == 2 and _names(traced) == ["mul", "add"]


class _Scoped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Turn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).contiguous()


class _Turn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


def test_the_scope_of_a_method_call_in_a_submodule_and_in_the_root() -> None:
    traced = trace(_Scoped(), {"x": torch.empty(2, 3)})
    assert traced.scope(traced.find_one("transpose")) == Scope("inner", _Turn)
    assert traced.scope(traced.find_one("contiguous")) == Scope("", None)


def test_bert_by_three_input_names() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    model = BertModel(BertConfig(num_hidden_layers=2, **sizes)).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    given = {name: torch.ones(2, 8, dtype=torch.long) for name in names}
    graph, _ = hf_symbolic_trace(model, names, dummy_inputs=given)
    assert [n.name for n in graph.graph.nodes if n.op == "placeholder"] == names
    with torch.no_grad():
        found, wanted = graph(**given), model(**given)
    assert torch.equal(found["last_hidden_state"], wanted.last_hidden_state)


class _Choosy(nn.Module):
    """Its path depends on the value of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x.sum() > 0 else self.other(x)


def test_a_registered_leaf_is_one_call() -> None:
    RobustTracer.register_leaf(_Choosy)
    try:
        graph = RobustTracer().trace(nn.Sequential(_Choosy(), nn.ReLU()), {"input": torch.randn(2, 4)})
    finally:
        RobustTracer.unregister_leaf(_Choosy)
    assert [n.target for n in graph.nodes if n.op == "call_module"] == ["0", "1"]


def test_a_failing_submodule_is_traced_in_parts() -> None:
    choosy = _Choosy()
    model = nn.Sequential(choosy, nn.ReLU())
    found = recursive_trace(model, {"input": torch.randn(2, 4)})
    assert set(found) == {model, choosy.one, choosy.other}
    assert found.is_failed(choosy)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(self.first(x)))


def test_execution_order_and_use_of_parameters_with_a_shared_module() -> None:
    model = _Shared()
    order = trace(model, {"x": torch.empty(2, 4)}).order
    assert order.modules == [model, model.first, model.second, model.first]
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in order.params] == ["first.weight", "first.bias", "second.weight", "second.bias"]


class _Control(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        total, sums = scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), x)
        return torch.vmap(lambda row: (row * total).sum())(sums)


def test_cond_scan_and_vmap_in_a_forward() -> None:
    traced = trace(_Control(), {"x": torch.empty(3, 4)})
    assert {"cond", "scan"} <= set(_names(traced))
    for x in (torch.rand(3, 4), -torch.rand(3, 4)):
        assert torch.allclose(traced.gm(x), _Control()(x))


class _Sizes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0 or x.size(0) == 0:
            return x
        return functional.relu(x) if x.shape[1] == 4 else x


def test_numel_and_sizes_of_dynamic_dims() -> None:
    traced = trace(_Sizes(), {"x": torch.empty(3, 4)}, dynamic_shapes={"x": {0: "batch"}})
    assert _names(traced) == ["relu"]
    for rows in (1, 7):
        x = torch.randn(rows, 4)
        assert torch.equal(traced.gm(x), torch.relu(x))


class _Attention(nn.Module):
    """Ops whose data-free kernels take plain sizes only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.layer_norm(torch.where(x > 0, x, 0.0), (4,)).view(x.shape[0], -1, 2, 2).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(x)
        return (x @ x.transpose(-1, -2) @ x).sum()


@pytest.mark.parametrize("model", [_Attention(), _Products()], ids=["attention", "products"])
def test_every_kernel_takes_dynamic_dims(model: nn.Module) -> None:
    traced = trace(model, {"x": torch.empty(3, 6, 4)}, dynamic_shapes={"x": {0: "batch", 1: "length"}})
    for shape in ((3, 6, 4), (2, 9, 4)):
        x = torch.randn(shape)
        assert torch.equal(traced.gm(x), model(x))
