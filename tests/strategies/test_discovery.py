"""Ops without a rule: what discovery finds by running them, and what it must not claim."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import InputError
from autopar.strategies import NoRuleWarning, strategies_for
from autopar.strategies.arguments import qualified_name
from autopar.strategies.check import check
from autopar.strategies.discovery import Found, cache, discover, trying
from autopar.strategies.discovery.apart import Died, search_apart
from autopar.strategies.examples import example
from autopar.tracing import trace
from autopar.user_warnings import AutoparWarning


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache file of discovery, empty for each test."""
    path = tmp_path / "discovered.json"
    monkeypatch.setenv("AUTOPAR_DISCOVERY_CACHE", str(path))
    monkeypatch.setattr(trying, "_known", {})
    return path


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def ids(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, limit, shape)


def product(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return a @ weight.t()


def root_norm(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(a, (a.shape[-1],), weight)


def gated(a: torch.Tensor) -> torch.Tensor:
    gate, up = a.chunk(2, -1)
    return F.silu(gate) * up


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def split_heads(a: torch.Tensor, count: int) -> torch.Tensor:
    return a.unflatten(-1, (count, -1)).transpose(-2, -3)


def largest(a: torch.Tensor) -> torch.Tensor:
    return a.amax(1)


def look_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, table)


def total(a: torch.Tensor) -> torch.Tensor:
    return a.sum()


def blank(a: torch.Tensor) -> torch.Tensor:
    return a.new_ones(3)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class WrongBackward(Tripled):
    """Its forward can be split on every dim, but its gradient mixes the rows."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.cumsum(0)


def tripled(a: torch.Tensor) -> torch.Tensor:
    return Tripled.apply(a)


def mixed(a: torch.Tensor) -> torch.Tensor:
    return WrongBackward.apply(a)


def bagged(index: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(index, table, offsets, mode="sum")


RULES: dict[str, tuple[Any, ...]] = {
    "a b d, c d -> a b c | linear:0 linear:1": (product, x(16, 512, 768), x(1024, 768)),
    "a b _, _ -> a b _ | linear:1": (root_norm, x(16, 512, 768), x(768)),
    "a b (_ c) -> a b c": (gated, x(16, 512, 2048)),
    "a b c _, a b _ _, a b _ d -> a b c d | linear:2": (attend, x(2, 8, 64, 16), x(2, 8, 64, 16), x(2, 8, 64, 16)),
    "a b _ -> a _ b _ | linear": (split_heads, x(16, 512, 768), 12),
    "a c b -> a b | c max": (largest, x(16, 64, 32).detach()),
    "a _ b -> a b": (largest, x(16, 64, 32)),  # equal elements on several ranks share the gradient
    "a b, _ c -> a b c | linear:1": (look_up, ids(50, 4, 8), x(50, 16)),
    "a b -> | linear": (total, x(6, 10)),
    "a b -> _ | a idle whole, b idle whole": (blank, x(6, 10).detach()),
    "a b -> a b | linear": (tripled, x(6, 10)),
    "_ a -> _ a | linear": (mixed, x(6, 10)),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_of(rule: str) -> None:
    target, *args = RULES[rule]
    assert discover(example(target, *args)[0]) == Found(rule)


def random(a: torch.Tensor) -> torch.Tensor:
    return a + torch.rand_like(a)


def positive_ones(a: torch.Tensor) -> torch.Tensor:
    return a[a > 0]


def raised(a: torch.Tensor) -> torch.Tensor:
    return a.add_(1)


def only_here(a: torch.Tensor) -> torch.Tensor:
    if a.shape[0] != 1000:
        raise ValueError("a thousand rows")
    return a[:, :1]


def spectrum(a: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(a)


def scrambled(a: torch.Tensor) -> torch.Tensor:
    return (a.flatten().cumsum(0) ** 2).reshape(a.shape)


def spread(a: torch.Tensor) -> torch.Tensor:
    return a.expand(4, -1, -1)


NONE: dict[str, tuple[Any, ...]] = {
    "its results are random": (random, x(4, 6)),
    "the shapes of its results depend on data": (positive_ones, torch.tensor([[1.0, -1.0]] * 12).double()),
    "it writes into its inputs": (raised, x(4, 6).detach()),
    r"too large to try|does not run on small tensors \(ValueError: a thousand rows\)": (only_here, x(1000, 200)),
    "its results are complex": (spectrum, x(4, 6)),
    "no way to split it was found": (scrambled, x(4, 6)),
    "no way to split it was found by": (torch.all, torch.rand(16, 512) > 0.5),
    "no way to split it was found by running it": (torch.prod, x(16, 512)),
    "no way to split it was found by running it on": (F.cosine_embedding_loss, x(8, 6), x(8, 6), torch.ones(8)),
    "no way to split it was found by running it on small": (spread, x(1, 0, 8)),
    "no way to split it was found by running it on small tensors": (
        torch.grid_sampler_3d,  # one number, between two points: the larger of them every other time
        x(1, 1, 2, 2, 2),
        x(1, 1, 1, 1, 3),
        0,
        1,
        False,
    ),
    "its integers could be tried as zeros alone": (bagged, ids(12, 8), x(12, 6), torch.tensor([0, 5])),
}


@pytest.mark.parametrize("why", NONE)
def test_there_is_no_rule_because(why: str, request: pytest.FixtureRequest) -> None:
    target, *args = NONE[why]
    found = discover(example(target, *args)[0])
    assert found.rule is None
    assert re.search(why, found.why), found.why


def of_chances(a: torch.Tensor) -> torch.Tensor:
    if not 0 < float(a.min()) <= float(a.max()) < 1:
        raise ValueError("no chances")
    return a.log() - (1 - a).log()


def test_what_takes_no_negative_numbers_is_tried_on_others() -> None:
    for op, *args in ((torch.multinomial, 3), (torch.poisson,), (torch.bernoulli,)):
        assert discover(example(op, torch.rand(16, 8), *args)[0]) == Found(None, "its results are random")
    assert discover(example(of_chances, torch.rand(16, 8))[0]) == Found("a b -> a b")


def test_draws_that_an_op_refuses_are_left_out() -> None:
    """Some random numbers are above 1, which is no valid quantile."""
    levels = torch.tensor([0.2, 0.8], dtype=torch.float64)
    assert discover(example(torch.quantile, x(2), levels, 0)[0]) == Found("_, a -> a")


def test_arguments_may_have_any_name() -> None:
    def apart(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output - target

    found = discover(example(apart, x(16, 512), target=x(16, 512))[0])
    assert found.rule is not None, found.why


def test_what_was_found_is_kept_and_run_before_it_is_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = example(product, x(16, 512), x(1024, 512))
    found = discover(node)
    ((key, line),) = json.loads(file.read_text()).items()
    assert line == {"rule": found.rule}

    def no_search(*_: Any) -> None:
        raise AssertionError("the search is saved")

    monkeypatch.setattr(trying, "search_apart", no_search)
    monkeypatch.setattr(trying, "_known", {})
    assert discover(example(product, x(32, 128), x(96, 128))[0]) == found  # the rule does not depend on sizes
    # the op of that name has changed: the cached rule fails when it is run, so it is searched again
    monkeypatch.setattr(trying, "_known", {})
    file.write_text(json.dumps({key: {"rule": "a b, c b -> a c | linear"}}))
    with pytest.raises(AssertionError, match="the search is saved"):
        discover(node)


def test_a_damaged_file_is_left_aside_with_a_warning(file: Path) -> None:
    file.write_text("{")
    with pytest.warns(AutoparWarning, match="is left aside"):
        assert discover(example(tripled, x(6, 10))[0]).rule is not None


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("AUTOPAR_DISCOVERY_CACHE", str(tmp_path / "taken" / "file.json"))
    with pytest.warns(AutoparWarning, match="are not kept|is left aside"):
        assert discover(example(tripled, x(6, 10))[0]).rule is not None


def test_it_can_be_turned_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DISCOVERY", "0")
    assert discover(example(tripled, x(6, 10))[0]) == Found(None, "discovery is off (AUTOPAR_DISCOVERY=0)")
    monkeypatch.setenv("AUTOPAR_DISCOVERY", "off")  # an invalid value that probably means off must not run ops
    with pytest.raises(InputError, match="AUTOPAR_DISCOVERY is 'off': set it to 0 for off"):
        discover(example(tripled, x(6, 10))[0])
    assert not file.exists()


def test_the_generator_is_left_as_it_was() -> None:
    nodes = [example(random, x(4, 6))[0], example(product, x(4, 6), x(8, 6))[0]]
    state = torch.get_rng_state()
    for node in nodes:
        discover(node)
    assert torch.equal(state, torch.get_rng_state())


def test_inference_mode_around_changes_nothing() -> None:
    """Evaluation may be the first to meet an op, and the rule that it finds is used for training later."""
    with torch.inference_mode():
        assert discover(example(tripled, torch.randn(6, 10))[0]) == Found("a b -> a b | linear")


def test_a_trial_that_ends_its_process_has_failed() -> None:
    def holds(text: str) -> bool:
        if text == "deadly":
            os.abort()
        return text != "wrong"

    def search(trial: Any) -> list[str]:
        return [text for text in ("right", "deadly", "wrong", "also right") if trial(text)]

    assert search_apart(holds, search) == ["right", "also right"]


def test_an_op_that_ends_every_process_is_given_up() -> None:
    with pytest.raises(Died, match="ended"):
        search_apart(lambda text: os.abort(), lambda trial: [trial(str(i)) for i in range(100)])


class Unknown(nn.Module):
    """A product and a norm that the table does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 8))
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        h = torch.ops.autopar_tests_discovery.product(a, self.weight)
        return Tripled.apply(torch.ops.autopar_tests_discovery.root_norm(h, self.scale)).sum()


def _custom(name: str, function: Any) -> Any:
    """`function` as a custom operator with its own backward."""
    op = torch.library.custom_op(f"autopar_tests_discovery::{name}", function, mutates_args=())
    op.register_fake(lambda *args: function(*(a.detach() for a in args)).clone())

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(function(*leaves), leaves, grad)

    op.register_autograd(backward, setup_context=keep)
    return op


CUSTOM = [_custom("product", product), _custom("root_norm", root_norm)]


def test_custom_operators_and_autograd_functions_split_in_a_model() -> None:
    graph = trace(Unknown(), {"a": torch.zeros(4, 2, 8)}).graph
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoRuleWarning)
        strategies = strategies_for(graph, (2,))
    ways = {qualified_name(n): {tuple(map(str, s.outputs)) for s in strategies[n]} for n in strategies}
    assert ways["autopar_tests_discovery::product"] >= {("R",), ("S0",), ("S1",), ("S2",), ("P",)}
    assert ways["autopar_tests_discovery::root_norm"] >= {("R",), ("S0",), ("S1",)}
    assert ways[f"{__name__}.Tripled"] >= {("R",), ("S0",), ("S1",)}


SHIPPED = sorted(cache.shipped().items())


def test_the_rule_found_for_a_known_op_is_no_worse_than_the_tables() -> None:
    """For a matrix product discovery finds the table's rule."""
    node, tensors = example(torch.mm, x(16, 32), x(32, 64))
    found = discover(node).rule
    assert found is not None
    assert check(node, tensors, (2, 2)) > 1
    assert found.startswith(("a c, c b -> a b", "a b, b c -> a c"))


@pytest.mark.parametrize(("key", "line"), SHIPPED, ids=[key for key, _ in SHIPPED])
def test_what_comes_with_the_package_can_be_read(key: str, line: cache.Entry) -> None:
    from autopar.strategies import ShardingRule

    assert ShardingRule.parse(line["rule"]) if "rule" in line else line["why"]
