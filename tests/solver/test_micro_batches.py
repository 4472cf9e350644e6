"""Given several numbers of micro-batches, the planner chooses the best of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from toys import Stack, cluster, on_meta

import autopar
from autopar import InfeasibleError, InputError
from autopar.errors import TimeLimitError
from autopar.planning.micro_batches import part
from autopar.planning.stages import Prepared

ROWS = 64


def _plans(budget: int | None) -> dict[int, autopar.Plan]:
    found = {}
    for count in (1, 2, 4):
        examples = {"x": torch.empty(ROWS // count, 16, device="meta")}
        try:
            made = autopar.plan(
                on_meta(Stack, 2), examples, cluster(2), micro_batches=count, memory_budget=budget, precision="fp32"
            )
        except InfeasibleError:
            continue
        found[count] = made
    return found


def test_the_fastest_that_fits_is_chosen() -> None:
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    peaks = {count: made.predicted.peak_bytes for count, made in _plans(None).items()}
    chosen = []
    for budget in (None, peaks[1] - 1, (peaks[1] + peaks[4]) // 2):
        alone = _plans(budget)
        best = min(alone, key=lambda count: alone[count].predicted.step_seconds)
        free = autopar.plan(
            on_meta(Stack, 2), examples, cluster(2), micro_batches=[4, 1, 2], memory_budget=budget, precision="fp32"
        )
        assert free.micro_batches == best
        assert free.predicted == alone[best].predicted
        assert free.certificate.bound == min(made.certificate.bound for made in alone.values())
        chosen.append(best)
    assert chosen[0] == 1, "moving parameters once is the fastest where memory is no matter"


def test_numbers_that_cannot_be() -> None:
    examples = {"x": torch.empty(ROWS, 16, device="meta"), "scale": torch.empty(1), "name": "x"}
    assert part(examples, 4)["x"].shape == (16, 16)
    with pytest.raises(InputError, match="has 3, which does not divide the 64 rows"):
        part(examples, 3)
    with pytest.raises(InputError, match="has 0"):
        part(examples, 0)
    with pytest.raises(InputError, match="is empty"):
        autopar.plan(on_meta(Stack, 2), {"x": examples["x"]}, cluster(2), micro_batches=[])


@pytest.mark.parametrize("count", [32, ROWS], ids=["half a row each", "one row"])
def test_each_rank_has_its_rows_of_every_micro_batch(count: int) -> None:
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    with pytest.raises(InputError, match=f"has {count}, and with .* each of the 4 ranks .* of the 64 rows"):
        autopar.plan(on_meta(Stack, 2), examples, cluster(4), micro_batches=[1, count], inputs="local")
    fits = autopar.plan(on_meta(Stack, 2), examples, cluster(4), micro_batches=[16], inputs="local", precision="fp32")
    assert fits.micro_batches == 16


def test_a_comparison_is_made_at_the_number_that_is_chosen() -> None:
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    peaks = {count: made.predicted.peak_bytes for count, made in _plans(None).items()}
    budget = (peaks[1] + peaks[4]) // 2
    options = {"memory_budget": budget, "precision": "fp32"}
    free = autopar.plan(on_meta(Stack, 2), examples, cluster(2), micro_batches=[1, 2, 4], **options)  # type: ignore[arg-type]
    assert free.micro_batches > 1
    compared = autopar.compare(
        on_meta(Stack, 2),
        examples,
        cluster(2),
        against="fsdp",
        micro_batches=[1, 2, 4],
        **options,  # type: ignore[arg-type]
    )
    assert (compared.micro_batches, compared.predicted) == (free.micro_batches, free.predicted)
    assert compared.certificate.bound == free.certificate.bound
    [fsdp] = compared.comparison
    alone = autopar.compare(
        on_meta(Stack, 2),
        part(examples, free.micro_batches),
        cluster(2),
        against="fsdp",
        micro_batches=free.micro_batches,
        **options,  # type: ignore[arg-type]
    )
    assert fsdp == alone.comparison[0]


def test_a_search_chooses_for_each_mesh() -> None:
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    found = autopar.search(on_meta(Stack, 2), examples, "cpu", 4, micro_batches=[1, 2], precision="fp32")
    assert {result.mesh_shape for result in found} == {(4,), (2, 2)}
    for result in found:
        mesh = autopar.Cluster.preset("cpu", result.mesh_shape)
        alone = autopar.plan(on_meta(Stack, 2), examples, mesh, micro_batches=[1, 2], precision="fp32")
        assert result.plan is not None
        assert (result.plan.micro_batches, result.plan.predicted) == (alone.micro_batches, alone.predicted)


def test_where_none_fits_the_error_is_of_the_one_that_needs_least() -> None:
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    needs = []
    for numbers in (1, 2, 4, [4, 2, 1]):
        mine = part(examples, numbers) if isinstance(numbers, int) else examples
        with pytest.raises(InfeasibleError) as refused:
            autopar.plan(on_meta(Stack, 2), mine, cluster(2), micro_batches=numbers, memory_budget=1000)
        needs.append(refused.value.smallest_budget_bytes)
    assert needs[3] == min(needs[:3])


def _found(monkeypatch: pytest.MonkeyPatch, other: Callable[[autopar.Plan], autopar.Plan]) -> autopar.Plan:
    """The plan for [1, 2] micro-batches, where `other` replaces the solver's result for 2."""
    real = Prepared.solve

    def solve(self: Prepared, **options: Any) -> autopar.Plan:
        made = real(self, **options)
        is_other = self.request.micro_batches == 2 and "memory_budget_bytes" not in options
        return other(made) if is_other else made

    monkeypatch.setattr(Prepared, "solve", solve)
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    return autopar.plan(on_meta(Stack, 2), examples, cluster(2), micro_batches=[1, 2], precision="fp32")


def test_what_is_proven_is_proven_of_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def poor(made: autopar.Plan) -> autopar.Plan:
        bound = made.certificate.objective * 0.3
        return replace(made, certificate=replace(made.certificate, status="feasible", bound=bound, gap=0.7))

    found = _found(monkeypatch, poor)
    assert found.micro_batches == 1
    assert (found.certificate.status, found.certificate.gap > 0.1) == ("feasible", True)


@pytest.mark.parametrize(
    "error",
    [
        TimeLimitError("no plan was found in time"),
        InfeasibleError("no plan was found that fits", smallest_budget_bytes=1 << 60, budget_lower_bound_bytes=1),
    ],
    ids=["late", "not proven"],
)
def test_a_number_without_a_plan_leaves_those_of_others(
    monkeypatch: pytest.MonkeyPatch, error: TimeLimitError | InfeasibleError
) -> None:
    def refused(made: autopar.Plan) -> autopar.Plan:
        raise error

    with pytest.warns(UserWarning, match="2 micro-batches are left out: no plan"):
        found = _found(monkeypatch, refused)
    assert found.micro_batches == 1
    monkeypatch.undo()
    free = _plans(None)
    assert found.certificate.bound == min(free[1].certificate.bound, free[2].certificate.bound)


def test_where_no_number_has_a_plan_in_time_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Prepared, **options: Any) -> autopar.Plan:
        raise TimeLimitError("no plan was found in time")

    monkeypatch.setattr(Prepared, "solve", late)
    examples = {"x": torch.empty(ROWS, 16, device="meta")}
    with pytest.raises(TimeLimitError, match="in time"):
        autopar.plan(on_meta(Stack, 2), examples, cluster(2), micro_batches=[1, 2], precision="fp32")
