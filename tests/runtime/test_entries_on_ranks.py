"""Submodules and other methods of a planned model can be called as those of a plain one, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values
from loop_cases import PRESETS


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("entry_cases.py", 2)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", ["training", "changed", "accumulated"])
def test_they_give_what_one_process_gives(case: str, preset: str, ranks: list[dict[str, Any]]) -> None:
    assert all(value < 1e-12 for value in values(ranks, f"{case}-{preset}"))


@pytest.mark.parametrize("preset", PRESETS)
def test_hooks_of_a_submodule_see_plain_tensors_once_a_call(preset: str, ranks: list[dict[str, Any]]) -> None:
    for apart, plain, calls in values(ranks, f"hooked-{preset}"):  # the model's own call includes the hook, as traced
        assert (apart < 1e-12, calls - plain, plain) == (True, 0, 5)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_copy_calls_its_own_modules(preset: str, ranks: list[dict[str, Any]]) -> None:
    for apart, message in values(ranks, f"copied-{preset}"):
        assert apart < 1e-12
        assert message.startswith("a copy of 'up' of a planned model was called") or preset == "ddp"


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_no_method_of_a_planned_model_is_refused(preset: str, ranks: list[dict[str, Any]]) -> None:
    for misspelt, forward, plain, inner in values(ranks, f"refused-{preset}"):
        assert misspelt == "Autoencoder has no method 'encod' beside forward: did you mean 'encode'?"
        assert forward.startswith("Autoencoder has no method 'forward' beside forward")
        assert plain.startswith("this Autoencoder is no part of a planned model")
        assert "did you mean 'extra_repr'" in inner


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_each_rank_count_as_under_data_parallel(preset: str, ranks: list[dict[str, Any]]) -> None:
    assert all(max(found) < 1e-12 for found in values(ranks, f"own_rows-{preset}"))


def test_a_number_that_all_ranks_have_gets_the_mean_of_their_gradients(ranks: list[dict[str, Any]]) -> None:
    assert all(value < 1e-12 for value in values(ranks, "scale"))


def test_each_of_many_modules_is_planned_once(ranks: list[dict[str, Any]]) -> None:
    for worst, numbers in values(ranks, "many"):
        assert (worst < 1e-12, numbers) == (True, 1)
