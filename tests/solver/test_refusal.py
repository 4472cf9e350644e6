"""The error message where no plan fits: the budgets that it names have plans, and its hints help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from toys import on_meta

import autopar
from autopar.errors import InfeasibleError
from autopar.sizes import parse_bytes, show_bytes, show_bytes_down, show_bytes_up
from autopar.solver.search import under_budget
from autopar.solver.search.smallest import LeastMemory, Smallest


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).square().mean()


def refused(rows: int = 64, budget: int | str = 1000, ranks: int = 4, **options: object) -> InfeasibleError:
    inputs, mesh = {"x": torch.empty(rows, 64, device="meta")}, autopar.Cluster.preset("cpu", (ranks,))
    with pytest.raises(InfeasibleError) as error:
        autopar.plan(on_meta(Wide), inputs, mesh, memory_budget=budget, **options)  # type: ignore[arg-type]
    return error.value


@pytest.mark.parametrize("count", [1, 1023, 1025, 2**20 - 1, 2**20 + 1, 136357150, 3 * 2**30 // 100, 10**13 + 7])
def test_amounts_are_shown_as_what_is_enough_and_what_is_not(count: int) -> None:
    assert count <= parse_bytes(show_bytes_up(count)) <= count * 1.01 + 1
    assert count * 0.99 - 1 <= parse_bytes(show_bytes_down(count)) <= count


@pytest.mark.parametrize("rows", [64, 72, 520, 1000])
def test_the_budget_in_the_text_has_a_plan(rows: int) -> None:
    error = refused(rows)
    [named] = re.findall(r"smallest budget that the planner finds one for is ([0-9.]+ \w+)", error.message)
    assert error.smallest_budget_bytes is not None
    assert parse_bytes(named) >= error.smallest_budget_bytes
    inputs = {"x": torch.empty(rows, 64, device="meta")}
    made = autopar.plan(on_meta(Wide), inputs, autopar.Cluster.preset("cpu", (4,)), memory_budget=named)
    assert made.predicted.peak_bytes <= parse_bytes(named)


def test_a_budget_that_would_look_like_enough_is_shown_to_the_byte() -> None:
    rows = 8192
    least = refused(rows).smallest_budget_bytes
    assert least is not None
    asked = least - 1000
    assert show_bytes(asked, digits=2) == show_bytes_up(least), "no such case: take other rows"
    assert (
        f"no plan fits {asked} B per device: the smallest budget that the planner finds one for is {least} B"
        in refused(rows, asked).message
    )


def test_the_proven_bound_is_carried_beside_the_budget_that_has_a_plan() -> None:
    exact = refused()
    assert exact.smallest_budget_bytes is not None and exact.budget_lower_bound_bytes is not None
    assert exact.budget_lower_bound_bytes <= exact.smallest_budget_bytes <= exact.budget_lower_bound_bytes * 1.01 + 64


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        ({}, ("a larger mesh axis", "more micro-batches", "another optimizer"), ("without the constraints",)),
        ({"optimizer": "sgd"}, ("more micro-batches",), ("another optimizer",)),
        ({"rows": 1}, ("another optimizer",), ("more micro-batches",)),
        ({"constraints": "fsdp"}, ("without the constraints a smaller budget may be enough",), ()),
        (
            {"constraints": "ddp", "optimizer": "sgd", "rows": 4},
            ("without the constraints",),
            ("micro-batches may", "optimizer may"),
        ),
    ],
    ids=str,
)
def test_hints_are_those_that_can_help(
    options: dict[str, object], said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    message = refused(**options).message  # type: ignore[arg-type]
    assert all(text in message for text in said) and not any(text in message for text in unsaid), message


@pytest.mark.parametrize(("rows", "optimizer"), [(8, "sgd"), (16, "adafactor"), (16, "sgd"), (512, "sgd")])
def test_micro_batches_are_named_where_some_number_of_them_needs_less(rows: int, optimizer: str) -> None:
    """Every micro-batch but the last leaves its gradients: with large weights and few rows, more of them need more."""
    whole = refused(rows, optimizer=optimizer)
    numbers = [many for many in (2, 4, 8, 16) if rows // many >= 4]
    least = min(
        refused(rows // many, optimizer=optimizer, micro_batches=many).smallest_budget_bytes or 0 for many in numbers
    )
    assert ("more micro-batches" in whole.message) == (least < 0.99 * (whole.smallest_budget_bytes or 0))


def test_what_no_plan_saves_is_named() -> None:
    inputs, mesh = {"x": torch.empty(64, 64, device="meta")}, autopar.Cluster.preset("h100", (4,))
    with pytest.raises(InfeasibleError, match=r"no plan can save 66\.0 MiB of this"):
        autopar.plan(on_meta(Wide), inputs, mesh, memory_budget="60MiB")
    with pytest.raises(InfeasibleError) as error:
        autopar.plan(on_meta(Wide), inputs, mesh, memory_budget="66.01MiB")
    assert "no plan saves" not in error.value.message


def test_what_is_proven_is_said_to_be_so_by_the_planners_count() -> None:
    least = refused().smallest_budget_bytes
    assert least is not None
    near, far = refused(budget=least * 995 // 1000).message, refused(budget=least // 2).message
    for message in (near, far):
        assert "the smallest budget that the planner finds one for is" in message and "proven" not in message
    assert "the planner may overestimate the memory a little" in near
    assert "too high" not in far  # at that distance an overestimate makes no difference


def test_of_few_ways_it_does_not_say_that_no_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    least = refused().smallest_budget_bytes
    assert least is not None
    for name in ("PLAIN", "_MOST"):
        monkeypatch.setattr(under_budget, name, 0)
    monkeypatch.setattr(under_budget, "_FEW", (20,))
    exact = LeastMemory.smallest

    def far(asked: LeastMemory) -> Smallest:
        found = exact(asked)
        assert found is not None
        return replace(found, bound_bytes=0.9 * found.bound_bytes)

    monkeypatch.setattr(LeastMemory, "smallest", far)
    monkeypatch.setattr(LeastMemory, "is_too_small", lambda *_: False)
    error = refused(budget=int(0.95 * least))
    assert re.match(r"no plan was found that fits .* per device: none fits less than .*, .* found needs ", str(error))
    assert error.budget_lower_bound_bytes == pytest.approx(0.9 * least, rel=1e-3)
    assert error.smallest_budget_bytes == pytest.approx(least, rel=1e-3)
