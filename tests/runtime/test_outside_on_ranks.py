"""Parts of a planned model, and tensors and modules beside it."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values
from loop_cases import PRESETS


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("outside_cases.py", 2)


def test_a_submodule_loads_plain_tensors(ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, "submodule_loaded") == [0.0, 0.0]


def test_a_weight_that_a_layer_outside_shares_is_told(ranks: list[dict[str, Any]]) -> None:
    for told, behind in values(ranks, "tied_outside"):
        assert "a Linear outside of the model holds a parameter that autoparallelize has replaced" in told
        assert behind == "no error"


def test_numbers_are_formatted_or_told_how(ranks: list[dict[str, Any]]) -> None:
    for number, norm, part, text in values(ranks, "formatted"):
        assert norm == number or "read it first, on every rank" in norm
        assert "read it first, on every rank" in part
        assert text.startswith("DTensor(")


def test_tensors_that_lie_otherwise_are_compared_as_wholes(ranks: list[dict[str, Any]]) -> None:
    for answers in values(ranks, "compared"):
        assert all(answers), answers


def test_ops_in_place_equal_those_on_wholes(ranks: list[dict[str, Any]]) -> None:
    """Adaptive gradient clipping clamps norms in place; averages of a model mix its parameters and buffers."""
    for found in values(ranks, "in_place"):
        assert max(found.values()) < 1e-5, found


def test_steps_get_what_they_are_given(ranks: list[dict[str, Any]]) -> None:
    for found in values(ranks, "given_to_steps"):
        assert {what: got for what, got in found.items() if not all(got)} == {}


def test_steps_past_gradients_that_wait_are_refused(ranks: list[dict[str, Any]]) -> None:
    for told in values(ranks, "early_steps"):
        assert ["not summed over the ranks yet" in one for one in told] == [True, True, True, False, False]
        assert told[3:] == ["no error", "no error"]


def test_errors_of_torch_are_printed_with_what_to_write_instead(ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, "advised") == [[], []]


def test_ops_of_optimizers_give_what_they_give_on_wholes(ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, "ops_on_parts") == [{}, {}]


def test_extremes_over_ranks_keep_nan(ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, "extremes_of_ranks") == [[], []]


def test_no_write_into_a_part_is_lost(ranks: list[dict[str, Any]]) -> None:
    for told in values(ranks, "lost_writes"):
        of_norm = told.pop("a view of a norm")
        assert "writes a negative number into a view of a norm" in of_norm
        assert {what: error for what, error in told.items() if "the write would be lost" not in error} == {}
    assert all(values(ranks, "columns_written"))


def test_state_that_is_a_sum_of_parts_is_saved(ranks: list[dict[str, Any]]) -> None:
    assert max(values(ranks, "parts_of_sums_saved")) < 1e-12


@pytest.mark.parametrize("preset", PRESETS)
def test_tensors_that_are_loaded_stay_the_callers_own(preset: str, ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, f"given_values-{preset}") == [[], []]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_more_than_a_gradient_is_saved(preset: str, ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, f"saved_gradients-{preset}") == [[], []]
