"""Models built on the meta device get the values of one process on real ranks: see `large_cases`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from large_cases import CASES, MODELS, PRESETS
from launch import launch, needed, values
from thinned import thinned
from torch import nn

from autopar.errors import InputError
from autopar.runtime.stored.parameters import check_values


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    grid = [f"{name}-{preset}" for name in MODELS for preset in PRESETS]
    return launch("large_cases.py", 2, cases=needed(request, CASES[2], "name", "preset", of=grid))


@pytest.mark.parametrize(("name", "preset"), thinned(3, list(MODELS), PRESETS))
def test_values_are_one_process(name: str, preset: str, two: list[dict[str, Any]]) -> None:
    for found in values(two, f"{name}-{preset}"):
        assert found["was_on_meta"]
        assert found["differing"] == []
        assert not found["generators_differ"]
        assert not found["tied_apart"]
        assert found["loss_error"] < 1e-6
        # Bytes of the storages behind a rank's shards: none of them keeps a whole parameter alive.
        assert (
            found["share"] == pytest.approx(1) if preset == "ddp" else found["share"] < (0.6 if name != "odd" else 0.8)
        )


def test_draws_are_those_of_rank_zero(two: list[dict[str, Any]]) -> None:
    first, second = values(two, "seeds_of_rank_zero")
    assert first["differing"] == second["differing"] == []
    assert not first["kept"]  # the generator has advanced, as after building the model
    assert second["kept"]


def test_parameters_are_cast_to_the_plan(two: list[dict[str, Any]]) -> None:
    for found in values(two, "in_another_dtype"):
        assert found["differing"] == []


def test_a_checkpoint_fills_what_nothing_was_drawn_for(two: list[dict[str, Any]]) -> None:
    for found in values(two, "filled_by_a_checkpoint"):
        assert "on the meta device" in found["early"]
        assert not found["drawn"]
        assert found["step"] == 3
        assert found["differing"] == []


def test_no_rank_holds_the_whole_model(two: list[dict[str, Any]]) -> None:
    """A rank holds half of the model, and one of 64 layers with the numbers drawn for it."""
    for found in values(two, "never_whole"):
        assert 0.5 <= found["share"] < 0.6


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("run_without_values", "InputError: 'model.*' .* autopar.materialise"),
        ("nothing_fills_it", "InputError: nothing gives .*'second'.* pass the function that builds the model"),
        ("another_build", "InputError: the build function makes no '.*'"),
        ("one_rank_fails", "no such file"),
        ("ranks_build_differently", "PlanMismatchError: the ranks disagree about what the model's constructor does"),
        ("old_optimizer", "InputError: an optimizer still holds"),
        ("one_rank_has_values", "PlanMismatchError: the ranks disagree about which parameters and buffers"),
    ],
)
def test_what_cannot_be_is_told_on_every_rank(case: str, words: str, two: list[dict[str, Any]]) -> None:
    import re

    for text in values(two, case):
        assert re.search(words, text), text


@pytest.mark.parametrize(
    ("persistent", "ways"),
    [
        (True, r"materialise\(model\), or with autopar.load_weights\(model, folder\)"),
        (False, r"materialise\(model\), which leaves what is loaded as it is"),
    ],
)
def test_what_has_no_value_is_told_with_what_gives_one(persistent: bool, ways: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=persistent)
    with pytest.raises(
        InputError, match=f"'table' is on the meta device: give the model its values with autopar.{ways}"
    ):
        check_values(model)
