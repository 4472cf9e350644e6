"""The planning benchmark reports how many ops have rules, what a plan leaves replicated, and its failures."""

from __future__ import annotations

from typing import Any

import plan_worker
import plan_zoo
import pytest
import torch
import whole_traces
from torch import nn

OPTIONS: dict[str, Any] = {"batch": 16, "length": 16, "cpu_seconds": 20, "meshes": [[8], [2, 4]], "gap": 1e-3}


class Ruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 8192), nn.Linear(8192, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


class Unruled(Ruled):
    """Half of its products come after an op that cannot be split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Mixing.apply(torch.relu(self.up(x)))).square().mean()


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.flatten().cumsum(0).square().reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Broken(Ruled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x[:, :3])


class Drops(Ruled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x if self.training and torch.rand(()) < 0.5 else x * 2)


class Single(Ruled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.up(x)[None]
        return nn.functional.scaled_dot_product_attention(query, torch.ones_like(query, dtype=torch.float32), query)


class Reads(Ruled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor([5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x[: int(self.rows)])


def record(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch, *, data: bool = True) -> dict[str, Any]:
    def build(family: str, name: str, on_cpu: bool = False) -> tuple[nn.Module, str]:
        assert data or not on_cpu, "built with data though a trace without is whole"
        with torch.device("cpu" if on_cpu else "meta"):
            return kind(), ""

    monkeypatch.setattr(plan_worker, "build", build)
    monkeypatch.setattr(whole_traces, "build", build)
    monkeypatch.setattr(whole_traces, "examples", lambda *_: {"x": torch.empty(4096, 4096, device="meta")})
    return plan_worker.examine("causal-lm", kind.__name__, OPTIONS)


def test_a_model_under_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(Ruled, monkeypatch)
    assert (found["status"], found["under_rule"], found["none"]) == ("planned", 1, 0)
    assert found["on_batch"] == found["on_inner"] == 1
    assert {mesh: plan["replicated"] for mesh, plan in found["plans"].items()} == {"8": 0, "2x4": 0}
    assert found["flops"] == 4096 * 4096 * 8192 * 2 * (2 + 3)  # the input needs no gradient


def test_what_is_without_a_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(Unruled, monkeypatch)
    assert found["ops_without"] == {f"{__name__}.Mixing": 1}
    text = "\n".join(plan_zoo.report([found, record(Broken, monkeypatch)], ["a note"], [[found]]))
    assert "0 of 1 (0.0 %)" in text and "| Unruled | 2x4 |" in text
    assert "a note" in text
    assert f"| {__name__}.Mixing | 1 | Unruled |" in text
    assert "| Broken | not traced | RuntimeError" in text
    assert "| AutoModelForCausalLM | 2 | 1 | 0 | 1 | 0 | 1/1 |" in text


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Ruled, ""),
        (Drops, whole_traces.EVAL),
        (Single, whole_traces.FLOAT32),
        (Reads, whole_traces.WITH_DATA),
    ],
)
def test_as_little_is_changed_as_possible(kind: type[nn.Module], changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(kind, monkeypatch, data=changed == whole_traces.WITH_DATA)
    assert (found["status"], found["changed"]) == ("planned", changed)
