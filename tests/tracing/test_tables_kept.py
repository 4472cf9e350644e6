"""Caches outside of modules contain no data-free tensors after a trace."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from autopar.tracing import TraceError, trace
from autopar.tracing.model_state import caches

Tensor = torch.Tensor
TABLES: dict[int, Any] = {}
MANY: list[Tensor] = []
LAST: Tensor | None = None


def made(length: int) -> Tensor:
    return (torch.arange(length, dtype=torch.float32)[:, None] / torch.arange(1, 5)).sin()


@functools.lru_cache(maxsize=2)
def limited(length: int) -> Tensor:
    return made(length)


@functools.cache
def unlimited(length: int) -> tuple[Tensor, Tensor]:
    return made(length), made(length).cos()


def remembered(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """A user's own memoising decorator, which keeps results in its closure."""
    results: dict[int, Tensor] = {}

    @functools.wraps(function)
    def asked(length: int) -> Tensor:
        if length not in results:
            results[length] = function(length)
        return results[length]

    return asked


memoised = remembered(made)


class Slots:
    """An object with `__slots__`, whose attributes are not in a dict."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


SLOTS = Slots()


class Tables:
    """A plain object that caches one table."""

    last: Tensor | None = None

    def of(self, length: int) -> Tensor:
        if self.last is None:
            self.last = made(length)
        return self.last


class Net(nn.Module):
    tables: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    @functools.cache
    def of_length(length: int) -> Tensor:
        return made(length)

    last: ClassVar[Tensor | None] = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.own, self.plain = nn.Linear(4, 4), kind, dict[int, Tensor](), Tables()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + KINDS[self.kind](self, x.shape[1])
        if self.kind == "failing":
            raise ValueError("no way")
        return y


def _in_a_dict(tables: dict[int, Any], length: int) -> Tensor:
    if length not in tables:
        tables[length] = made(length), "sines"
    found: Tensor = tables[length][0]
    return found


def _of_the_class(net: Net, length: int) -> Tensor:
    if Net.last is None:
        Net.last = made(length)
    return Net.last


def _global(net: Net, length: int) -> Tensor:
    global LAST
    LAST = made(length) if LAST is None else LAST
    return LAST


def _in_a_list(tables: list[Tensor], length: int) -> Tensor:
    if not tables:
        tables.append(made(length))
    return tables[-1]


KINDS: dict[str, Callable[[Net, int], Tensor]] = {
    "limited": lambda net, length: limited(length),
    "unlimited": lambda net, length: unlimited(length)[1],
    "a dict": lambda net, length: _in_a_dict(TABLES, length),
    "its own dict": lambda net, length: _in_a_dict(net.own, length),
    "the class's dict": lambda net, length: _in_a_dict(net.tables, length),
    "an attribute of the class": _of_the_class,
    "a global": _global,
    "a list": lambda net, length: _in_a_list(MANY, length),
    "a closure": lambda net, length: memoised(length),
    "a static method": lambda net, length: net.of_length(length),
    "an object with slots": lambda net, length: _in_a_list(SLOTS.kept, length),
    "a plain object": lambda net, length: net.plain.of(length),
    "failing": lambda net, length: limited(length),
}


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (limited, unlimited, Net.of_length):
        cached.cache_clear()
    for kept in (TABLES, MANY, Net.tables, SLOTS.kept):
        kept.clear()
    monkeypatch.setattr(sys.modules[__name__], "memoised", remembered(made))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "failing"])
def test_the_model_and_the_next_trace_find_none(kind: str) -> None:
    model, x = Net(kind), torch.randn(2, 3, 4)
    first = trace(model, {"x": x})
    second = trace(model, {"x": x})
    expected = model(x)
    assert not expected.is_meta
    for traced in (first, second, trace(model, {"x": x})):  # the last trace with what the model has cached
        torch.testing.assert_close(traced.gm(x), expected)


@pytest.mark.parametrize(
    "kind", ["limited", "unlimited", "a dict", "the class's dict", "a list", "a closure", "a static method"]
)
def test_where_caches_are_by_rule_not_every_object_is_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searching all objects takes longer the more a process has created."""
    model, x, asked = Net(kind), torch.randn(2, 3, 4), list[tuple[Any, ...]]()

    def referrers(*of: Any) -> list[Any]:
        asked.append(of)
        return gc.get_referrers(*of)

    monkeypatch.setattr(caches, "gc", SimpleNamespace(get_referrers=referrers))
    trace(model, {"x": x})
    assert not asked
    assert not KINDS[kind](model, 3).is_meta
    trace(Net("an object with slots"), {"x": x})
    assert asked
    assert not SLOTS.kept


def test_nor_behind_a_trace_that_failed() -> None:
    model, x = Net("failing"), torch.randn(2, 3, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="no way"):
            trace(model, {"x": x})
    model.kind = "limited"
    assert model(x).isfinite().all()


class Chosen(nn.Module):
    """Its path depends on data, so it is a leaf, whose trial runs fill the cache."""

    def forward(self, x: Tensor) -> Tensor:
        return x + limited(x.shape[1]) if x.sum() > 0 else x - limited(x.shape[1])


def test_nor_behind_a_leafs_trial() -> None:
    large = nn.Linear(4, 4)
    large.spare = nn.Parameter(torch.empty(1 << 23, device="meta"))  # too large for trial runs on data
    chosen = Chosen()
    chosen.inner = large
    model, x = nn.Sequential(nn.Linear(4, 4), chosen), torch.randn(2, 3, 4)
    traced = trace(model, {"input": x}, unsupported="leaf")
    assert any(node.op == "call_module" for node in traced.graph.nodes)
    assert not limited(3).is_meta


def test_what_forward_keeps_of_its_own_stays() -> None:
    class Keeping(nn.Module):
        seen: ClassVar[dict[str, Any]] = {}

        def forward(self, x: Tensor) -> Tensor:
            Keeping.seen["times"] = Keeping.seen.get("times", 0) + 1
            self.seen["table"] = self.seen.get("table", made(3))
            return x * 2

    Keeping.seen["before"] = torch.ones(2)
    trace(Keeping(), {"x": torch.randn(2)})
    assert Keeping.seen.keys() == {"before", "times"} and Keeping.seen["before"].sum() == 2


def test_what_a_library_imports_lazily_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"no optional dependency for {name}")

    monkeypatch.setitem(sys.modules, "a_lazy_module", Lazy("a_lazy_module"))
    assert trace(lambda x: x * made(len(x)), {"x": torch.randn(3, 4)})


def test_errors_of_a_trace_are_not_those_of_its_caches() -> None:
    with pytest.raises(TraceError, match="asks for the contents"):
        trace(nn.Sequential(nn.Linear(4, 4), Chosen()), {"input": torch.randn(2, 3, 4)})
    assert not limited(3).is_meta
