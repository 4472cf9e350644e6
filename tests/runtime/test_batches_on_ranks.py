"""Training on data distributed over real ranks equals one process on all data: see `batch_cases`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from batch_cases import PRESETS, RUNS
from launch import launch, values

from autopar.runtime.calling.batches import PartSampler


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("batch_cases.py", 2)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return launch("batch_cases.py", 4)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RUNS)
def test_trains_as_one_process(name: str, preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"{name}-{preset}"):
        assert found["losses"] == 2 * (2 if RUNS[name][2] else 3)
        assert found["loss_error"] < 1e-12
        assert found["parameter_error"] < 1e-12


def test_trains_as_one_process_on_two_axes(four: list[dict[str, Any]]) -> None:
    for found in values(four, "two_axes-fsdp+tp"):
        assert found["losses"] == 8
        assert found["loss_error"] < 1e-12
        assert found["parameter_error"] < 1e-12


@pytest.mark.parametrize("inputs", ["local", "global"])
def test_parts_are_those_of_the_batch(inputs: str, two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    for ranks in (two, four):
        for found in values(ranks, f"parts-{inputs}"):
            assert found["alike"]
            assert found["joined"]
            assert found["loss_error"] < 1e-12
    assert [found["last"] for found in values(two, f"parts-{inputs}")] == [1, 1] if inputs == "local" else [2, 2]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("too_many_inputs", r"InputError: 2 positional inputs were given, and the model takes 1: \['x'\]"),
        (
            "uneven_sampler",
            "InputError: the last batch has 1 of 4 rows, which 2 ranks cannot share evenly: .*drop_last",
        ),
        ("uneven_batch", "InputError: 'x' has 3 rows, which 2 ranks cannot share evenly: .* inputs=\"global\""),
        ("stream", "InputError: Endless has no length.*local_batch"),
        ("no_plan", "InputError: this Net has no plan"),
        (
            "passed_whole",
            r"InputError: .*'table' was passed whole: .* \(12, 8\) in all, where the example is \(6, 8\)\..*buffer",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_told(case: str, words: str, two: list[dict[str, Any]]) -> None:
    for text in values(two, case):
        assert re.match(words, text), text


def test_inputs_that_the_example_left_out_are_dealt_out(two: list[dict[str, Any]]) -> None:
    for worst in values(two, "another_input"):
        assert worst < 1e-12


def test_rows_on_another_dim_are_told_of_once(two: list[dict[str, Any]]) -> None:
    for told in values(two, "rows_on_dim_one"):
        assert len(told) == 1
        assert "'input' of shape (6, 4, 16) here is taken for rows of (12, 4, 16) in all" in told[0]


def test_targets_of_a_loss_outside_are_cut_as_the_rows(two: list[dict[str, Any]]) -> None:
    assert values(two, "target_outside") == [True, True]


def test_batches_that_part_are_found_by_the_call_of_twice_the_number(two: list[dict[str, Any]]) -> None:
    for call, told in values(two, "batches_part"):
        assert call == 20
        assert "the ranks disagree about the batch" in told and "DataLoader(generator=...)" in told


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "rows", "parts"), [(24, 8, 4), (28, 8, 4), (7, 7, 7), (6, 12, 2), (30, 6, 3)])
def test_parts_make_up_the_batches_of_one_process(length: int, rows: int, parts: int, shuffle: bool) -> None:
    samplers = [PartSampler(length, rows, part, parts, shuffle, 5, False) for part in range(parts)]
    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        mine = [torch.tensor(list(sampler)).split(sampler.batch_size) for sampler in samplers]
        assert all(len(sampler) == sum(map(len, part)) for sampler, part in zip(samplers, mine, strict=True))
        orders.append(torch.cat([row for batch in zip(*mine, strict=True) for row in batch]))
        generator = torch.Generator().manual_seed(5 + epoch)
        right = torch.randperm(length, generator=generator) if shuffle else torch.arange(length)
        assert torch.equal(orders[-1], right)
    assert shuffle != torch.equal(*orders)
