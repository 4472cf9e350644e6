"""Modules that cannot be traced, or that forward creates: they become leaves, and the trace undoes their changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.tracing import TraceError, known, trace


class Rehung(nn.Module):
    """As BigBird for short inputs: forward creates a module, and gives it the old module's layers."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.kind = inner or nn.Sequential(nn.Linear(4, 4)), "old"

    def forward(self, x):
        if self.kind == "old":
            made = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4, padding_idx=0), nn.LayerNorm(4))
            made[0] = self.inner[0]
            self.inner, self.kind = nn.Sequential(made[0], nn.ReLU()), "new"
        return self.inner(x)


def test_what_a_forward_changes_in_the_model_is_undone():
    model, x = Rehung(), torch.randn(2, 4)
    inner = model.inner
    traced = trace(model, dict(x=x))
    assert model.inner is inner and model.kind == "old" and list(model._modules) == ["inner"]
    assert {n.target for n in traced.graph.nodes if n.op == "get_attr"} == {"inner.0.weight", "inner.0.bias"}
    assert torch.allclose(traced.gm(x), model(x))


def test_parameters_made_in_a_forward_are_refused_where_they_are_used():
    class Fresh(nn.Module):
        def forward(self, x):
            return nn.Linear(4, 4)(x)

    with pytest.raises(TraceError, match="cannot see"):
        trace(Fresh(), dict(x=torch.randn(2, 4)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


def test_modules_in_the_same_place_of_each_layer_become_leaves_together(monkeypatch):
    from autopar.tracing import attempt

    runs = []
    run = attempt.Attempt.run
    monkeypatch.setattr(attempt.Attempt, "run", lambda self: (runs.append(self), run(self))[1])
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Branching()) for _ in range(6)), Branching())
    traced = trace(model, dict(input=torch.randn(2, 4)), unsupported="leaf")
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == [*(f"{i}.1" for i in range(6)), "6"]
    assert len(runs) < 5


class Counting(nn.Module):
    """Counts values of its input, like a router that splits tokens by expert."""

    def forward(self, x):
        return x.argsort(dim=0), (x > 0).sum(0).tolist()


class Cutting(nn.Module):
    def __init__(self):
        super().__init__()
        self.counting, self.linear = Counting(), nn.Linear(1, 1)

    def forward(self, x):
        order, (count,) = self.counting(x)
        rows = x[order[:, 0]]
        return torch.cat([rows[:-count] * 2, self.linear(rows[-count:])])


class Enclosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cutting = nn.Linear(1, 1), Cutting()

    def forward(self, x):
        return self.cutting(self.first(x))


def test_a_leaf_returns_no_numbers_that_depend_on_data():
    torch.manual_seed(0)
    model = Enclosing()
    traced = trace(model, dict(x=torch.randn(6, 1)), unsupported="leaf")
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["cutting"]
    for _ in range(3):
        x = torch.randn(6, 1)
        assert torch.equal(traced.gm(x), model(x))


def test_what_a_leaf_returns_is_found_out_by_its_parts():
    """Too large for a trial run as a whole, and no guessed count would cut its rows correctly."""

    class Pair(Cutting):
        def forward(self, x):
            return super().forward(x), x.sum(), None

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()
            self.pair.spare = nn.Parameter(torch.empty(1 << 23, device="meta"))

        def forward(self, x):
            rows, total, _ = self.pair(x)
            return rows * total

    traced = trace(Outer(), dict(x=torch.randn(6, 1)), unsupported="leaf")
    (output,) = traced.graph.output_node().args[0]
    assert output.meta["val"].shape == (6, 1)


class Catches(nn.Module):
    """Branches on its input, and takes another path on any error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            factor = 2.0 if bool(x.sum() > 0) else 3.0
        except Exception:  # any error at all
            factor = 5.0
        return self.inner(x) * factor


def test_a_part_that_fails_on_data_is_not_tried_on_it_within_itself():
    runs = list[float]()

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            if (total := x.sum().item()) not in (0, 1):  # trial data, not a guess
                runs.append(total)
                raise ValueError("no data suits")
            return x * total

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.failing = nn.Linear(3000, 3000), Failing()

        def forward(self, x):
            x = self.failing(x)
            return self.large(x.repeat(1, 750))[:, :4] if x.sum() > 0 else x

    trace(nn.Sequential(nn.Linear(4, 4), Around()), dict(input=torch.randn(2, 4)), unsupported="leaf")
    assert 1 <= len(runs) <= 6  # two kinds of data by itself and twice as a part: no trial runs inside another


def test_a_question_that_the_model_catches_is_not_forgotten() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Catches()).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(TraceError, match="asks for the contents"):
        trace(model, {"input": x})
    traced = trace(model, {"input": x}, unsupported="leaf")
    torch.testing.assert_close(traced.gm(x), model(x))
    assert [str(n.target) for n in traced.graph.nodes if n.op == "call_module"] == ["1"]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x * 2)
        return x if torch.rand([]) < 0.1 else self.layer(x)


class Keeping(nn.Module):
    """Cannot be a leaf itself: it returns an object that cannot be rebuilt from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = Dropped()

    def forward(self, x: torch.Tensor) -> Any:
        kept: list[torch.Tensor] = []
        y = self.dropped(x, kept)
        return y + kept[0], object()


def test_what_breaks_behind_a_leaf_tells_why_it_is_one() -> None:
    with pytest.raises(TraceError, match="Dropped, which is one op, puts something into a list") as broken:
        trace(Keeping(), {"x": torch.randn(2, 4)}, unsupported="leaf")
    [note] = broken.value.__notes__
    assert note.startswith("Dropped is a leaf, because")
    assert "random number (LayerDrop does)" in note


class Grid(nn.Module):
    """Returns an object; an input's value determines how much of the table it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 4))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> SimpleNamespace:
        rows, times = sizes.tolist()
        return SimpleNamespace(last=x + self.table[: rows * times - 3])


class OfGrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grid = Grid()

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return self.grid(x, sizes).last.sum()


def test_what_breaks_on_a_guess_begins_with_why_there_is_a_guess() -> None:
    inputs = {"x": torch.randn(6, 4), "sizes": torch.tensor([3, 3])}
    without_data = {name: tensor.to("meta") for name, tensor in inputs.items()}
    with (
        pytest.warns(UserWarning, match="assumed to have the shape of its first input"),
        pytest.raises(TraceError) as broken,
    ):
        trace(OfGrid(), without_data, unsupported="leaf")
    words = r"UnknownDataError: tolist\(\) asks for .*: give 'sizes' a known example .*What Grid returns is a guess"
    assert re.match(words, str(broken.value)), broken.value
    trace(OfGrid(), {**inputs, "sizes": known(inputs["sizes"])})


class Averaging(Branching):
    """Rebinds a buffer, before it reads data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return super().forward(x) - self.seen


def test_a_buffer_that_a_leaf_binds_is_its_own_again_behind_the_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Averaging())
    before = model[1].seen
    traced = trace(model, {"input": torch.randn(2, 4)}, unsupported="leaf")
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["1"]
    assert model[1].seen is before and before.device.type == "cpu"


def test_a_loop_that_no_guess_ends_is_not_tried_for_ever() -> None:
    """Solver steps, each repeated with half the step size while the error is large."""

    def solved(step: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        time, size = torch.zeros(()), torch.tensor(0.5)
        while time < 1:
            new = x + size * step(x)
            if (new - x).norm() <= 0.1:
                time, size, x = time + size, size * 2, new
            else:
                size = size / 2
        return x

    class Solving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(solved(lambda y: torch.tanh(self.inner(y)), x))

    model, x = Solving(), torch.randn(2, 4)
    traced = trace(model, {"x": x}, unsupported="leaf")
    torch.testing.assert_close(traced.gm(x), model(x))
