"""A user's own rule is executed to check it before it is accepted, and takes precedence over all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from writing_operators import centre

from autopar.errors import RuleError
from autopar.graph import target_name
from autopar.strategies import register_rule, strategies_for
from autopar.strategies.table import REGISTERED
from autopar.tracing import trace


@torch.library.custom_op("autopar_rules::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, weight: torch.Tensor, power: int = 1) -> torch.Tensor:
    return x * weight**power


@scale_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, power: int = 1) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.power = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = ctx.saved_tensors
    along = tuple(range(x.ndim - 1))
    return grad * weight**ctx.power, (grad * x * ctx.power * weight ** (ctx.power - 1)).sum(along), None


scale_rows.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("autopar_rules::needs_count", mutates_args=())
def needs_count(x: torch.Tensor, count: int) -> torch.Tensor:
    return x * count


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x * 2
        means = centre(rows)
        return self.linear(rows).sum() * means.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    REGISTERED.clear()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.autopar_rules.scale_rows(x, self.weight)


@pytest.mark.parametrize("op", ["autopar_rules::scale_rows", torch.ops.autopar_rules.scale_rows], ids=str)
def test_a_registered_rule_gives_the_strategies(op: Any) -> None:
    register_rule(op, "b s d, d -> b s d")
    assert list(REGISTERED) == ["autopar_rules::scale_rows"]
    graph = trace(Model(), {"x": torch.zeros(4, 2, 8)}).graph
    node = next(n for n in graph.nodes if "scale_rows" in target_name(n))
    ways = {s.factors[0]: tuple(map(str, s.inputs)) for s in strategies_for(graph, (2,))[node]}
    assert ways == {"": ("R", "R"), "b": ("S0", "R+"), "s": ("S1", "R+"), "d": ("S2", "S0")}


def test_an_autograd_function_by_its_class() -> None:
    register_rule(Doubled, "... -> ... | linear", args=(torch.rand(4, 8, dtype=torch.float64, requires_grad=True),))
    assert list(REGISTERED) == [f"{__name__}.Doubled"]


WRONG = {
    "malformed": ("b s d, d > b s d", r"write 'inputs -> outputs'"),
    "an unknown word": ("b s d, d -> b s d | lineal", r"note on 'lineal' names no factor"),
    "too few operands": ("b s d -> b s d", r"the op has 2 tensor inputs|never run"),
    "a sum that is none": ("b s d, d -> b s d | linear", r"split as P.*off by"),
    "a dim that is not shared": ("b s d, s -> b s d", r"scale_rows|factor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_refused(name: str) -> None:
    rule, message = WRONG[name]
    x, weight = (torch.rand(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 8, 12), (12,)))
    with pytest.raises(RuleError, match=message):
        register_rule("autopar_rules::scale_rows", rule, args=(x, weight))
    assert not REGISTERED


def test_a_wrong_rule_is_refused_on_tensors_made_from_it() -> None:
    with pytest.raises(RuleError, match=r"split as P.*off by"):
        register_rule("autopar_rules::scale_rows", "b s d, d -> b s d | linear")


def test_an_operator_that_is_not_there() -> None:
    with pytest.raises(RuleError, match=r"there is no operator 'autopar_rules::none'"):
        register_rule("autopar_rules::none", "... -> ...")


def test_a_call_that_does_not_run_says_so() -> None:
    with pytest.raises(RuleError, match="does not run on what it is given"):
        register_rule("autopar_rules::needs_count", "... -> ... | linear", args=(torch.rand(4),))
    register_rule("autopar_rules::needs_count", "... -> ... | linear", args=(torch.rand(4, 4).double(), 3))


def test_a_rule_that_does_not_fit_a_model_names_the_place() -> None:
    register_rule("autopar_rules::scale_rows", "b s d, d -> b s d")
    graph = trace(Model(), {"x": torch.zeros(4, 8)}).graph
    with pytest.raises(RuleError, match=r"scale_rows: rule .* does not fit a tensor of shape \(4, 8\) \[at .*\.py"):
        strategies_for(graph, (2,))


def test_the_rule_of_an_operator_that_writes_is_of_what_it_wrote() -> None:
    rows = torch.arange(64.0, dtype=torch.float64).view(4, 16)
    with pytest.raises(RuleError, match=r"autopar_writing.centre_\.default, rule 'b d -> b d, b', split as d"):
        register_rule("autopar_writing::centre_", "b d -> b d, b", args=(rows,))
    register_rule("autopar_writing::centre_", "b d! -> b d!, b", args=(rows,))
    traced = trace(Centred(), {"x": torch.randn(8, 16)})
    node = next(n for n in traced.graph.nodes if "centre" in target_name(n))
    found = {tuple(map(str, (*s.inputs, *s.outputs))) for s in strategies_for(traced.graph, (2,))[node]}
    assert found == {("R", "R", "R"), ("S0", "S0", "S0")}
