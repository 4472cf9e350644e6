"""Random numbers that libraries draw in forward, of which some cannot change it (a rate of 0 or 1, type checks)."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import UntraceableError
from autopar.tracing import trace

X = torch.randn(4, 3)
CHECK = "def generated(self, x, *, draw=draw):\n    draw(32)\n    return forward(self, x)\n"
LAYER = """
from random import random
from torch import nn

class Dropping(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share
    def forward(self, x):
        return x if random() < self.share else x * 2
"""


def run(code: str, filename: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, filename, "exec"), names)
    return names


def checked(filename: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator like those of type checkers: generates code that draws the index of an element to check."""
    return lambda forward: run(CHECK, filename, {"draw": random.getrandbits, "forward": forward})["generated"]


def around(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: forward(self, x)


def model(filename: str, *further: Callable[..., Any]) -> nn.Module:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for decorator in (checked(filename), *further):
        forward = decorator(forward)
    return type("Checked", (nn.Module,), {"forward": forward, "__module__": __name__})()


@pytest.mark.parametrize("further", [(), (around,)])
def test_a_generated_check_may_draw(further: tuple[Callable[..., Any], ...]) -> None:
    checking = model("<@checked(Checked.forward)>", *further)
    kept = random.getstate()
    assert torch.equal(trace(checking, {"x": X}).gm(X), X * 2)
    assert random.getstate() != kept


def test_other_code_that_is_run_from_text_may_not() -> None:
    with pytest.raises(UntraceableError, match="draws a number by"):
        trace(model("<string>"), {"x": X})


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], nn.Module]:
    """Makes a layer of an installed package that is skipped at random."""
    layers = ModuleType("installed_layers")
    layers.__file__ = "/lib/site-packages/installed_layers.py"
    run(LAYER, layers.__file__, layers.__dict__)
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    return layers.Dropping


@pytest.mark.parametrize(("share", "right"), [(0.0, X * 2), (1, X)])
def test_an_installed_layer_may_draw_where_there_is_no_choice(
    dropping: Callable[[float], nn.Module], share: float, right: torch.Tensor
) -> None:
    assert torch.equal(trace(dropping(share), {"x": X}).gm(X), right)


def test_an_installed_layer_may_not_choose(dropping: Callable[[float], nn.Module]) -> None:
    with pytest.raises(UntraceableError, match=r"a library \(the chance is 0.3\).*installed_layers.py:10"):
        trace(dropping(0.3), {"x": X})
