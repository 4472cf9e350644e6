"""Warnings point at the line of the user's own code that caused them."""

from __future__ import annotations

import ast
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar import AutoparWarning, Cluster, ConstraintWarning, LeafWarning, compare, plan, search
from autopar.runtime.calling.outer_autocast import outer_autocast
from autopar.tracing import trace
from autopar.user_warnings import users_line

ROOT = Path(__file__).parents[1]
TWO = Cluster.preset("cpu", shape=(2,))
X = {"x": torch.randn(4, 8)}


class Gated(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gate = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), Gated()

    def forward(self, x):
        return self.gate(self.wide(x)).square().mean()


class Plain(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()


class Counting(Plain):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Inside(nn.Module):
    """A leaf that cannot run without data, called through torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), Refusing())

    def forward(self, x):
        return self.layers(x).sum()


class Refusing(nn.Module):
    def forward(self, x):
        raise RuntimeError("no data")


CASES: dict[str, tuple[type[Warning], Callable[[], object]]] = {
    "leaf": (LeafWarning, lambda: plan(Net(), X, TWO)),
    "leaf, in compare": (LeafWarning, lambda: compare(Net(), X, TWO, against="ddp")),
    "leaf, in search": (LeafWarning, lambda: search(Net(), X, "cpu", 2)),
    "idle": (ConstraintWarning, lambda: plan(Plain(8, 8), X, TWO, constraints="param:bias != P")),
    "state": (AutoparWarning, lambda: plan(Counting(), X, TWO)),
}


@pytest.mark.parametrize("case", CASES)
def test_planning_warns_at_the_line_of_the_call(case: str) -> None:
    kind, call = CASES[case]
    with pytest.warns(kind) as found:
        call()
    told = [one for one in found if issubclass(one.category, AutoparWarning)]
    assert {(one.filename, one.lineno) for one in told} == {(__file__, call.__code__.co_firstlineno)}


def test_a_warning_of_a_layer_is_at_the_line_of_forward_that_calls_it() -> None:
    model = Inside()
    with pytest.warns(AutoparWarning, match="cannot run without its data") as found:
        trace(model, {"x": torch.empty(4, 8, device="meta")}, leaf_types=[Refusing])
    assert [(one.filename, one.lineno) for one in found] == [(__file__, model.forward.__code__.co_firstlineno + 1)]


def test_autocast_is_told_at_the_line_inside_it() -> None:
    traced = trace(nn.Linear(8, 8), {"input": X["x"]})
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(AutoparWarning, match="autocast") as found:
        outer_autocast(traced.graph, torch.device("cpu"))
    assert [(one.filename, one.lineno) for one in found] == [(__file__, sys._getframe().f_lineno - 1)]


def test_a_line_is_kept_for_another_thread() -> None:
    def wait() -> None:
        thread = threading.Thread(target=line.warn, args=["still waiting"])
        thread.start()
        thread.join()

    line = users_line()
    with pytest.warns(AutoparWarning, match="still waiting") as found:
        wait()
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line.number)]
    assert line.number == wait.__code__.co_firstlineno + 5


def test_one_line_is_told_once_and_another_again() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            users_line().warn("again and again")
        users_line().warn("again and again")
    assert len(found) == 2


def test_no_code_warns_but_by_the_users_line() -> None:
    """All warnings are issued by `autopar.user_warnings`."""
    packages = [ROOT / name for name in ("autopar", "solver", "strategies")]
    files = {file for package in packages for file in package.rglob("*.py")} - {ROOT / "autopar" / "user_warnings.py"}
    calls = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted(files)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("warnings.warn", "warnings.warn_explicit")
    ]
    assert len(files) > 200
    assert calls == []
