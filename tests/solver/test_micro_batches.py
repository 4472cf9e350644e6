"""A number of micro-batches that is left free is the best of those named."""

from __future__ import annotations

import pytest
import torch
from toys import Stack, cluster, on_meta

import autopar
from autopar import InfeasibleError, InputError
from autopar.micro_batches import part

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
