"""State that forward carries in attributes from call to call equals that of one process, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from carried_state_cases import CASES, GRID
from carried_state_models import MODELS
from launch import launch, needed, values
from loop_cases import PRESETS
from thinned import thinned


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("carried_state_cases.py", 2, cases=needed(request, CASES[2], "name", "preset", of=GRID))


@pytest.mark.parametrize(("name", "preset"), thinned(3, list(MODELS), PRESETS))
def test_sequences_of_calls_train_alike(name: str, preset: str, ranks: list[dict[str, Any]]) -> None:
    for worst, graphs in values(ranks, f"{name}-{preset}"):
        assert worst < 1e-12
        assert graphs <= 3  # for the first call, for later ones, and one in between


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_has_its_rows_of_states(name: str, ranks: list[dict[str, Any]]) -> None:
    assert all(worst < 1e-12 for worst in values(ranks, f"own_rows-{name}"))


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_backward_goes_through_calls(inputs: str, ranks: list[dict[str, Any]]) -> None:
    assert all(worst < 1e-12 for worst in values(ranks, f"through-{inputs}"))


@pytest.mark.parametrize("inputs", ["global", "local"])
@pytest.mark.parametrize("case", ["evaluated_first", "read_late", "asked_by_the_loop", "partly_reset"])
def test_states_are_found_late_read_and_set(case: str, inputs: str, ranks: list[dict[str, Any]]) -> None:
    assert all(worst < 1e-12 for worst in values(ranks, f"{case}-{inputs}"))


@pytest.mark.parametrize("case", ["compiled", "checkpointed", "copied", "on_its_own"])
def test_calls_of_every_kind_go_on(case: str, ranks: list[dict[str, Any]]) -> None:
    assert all(worst < 1e-12 for worst in values(ranks, case))


def test_a_loss_goes_on_too(ranks: list[dict[str, Any]]) -> None:
    for worst, average, has_none in values(ranks, "of_a_loss"):
        assert (worst < 1e-12, average, has_none) == (True, 1, 1)


def test_a_state_is_no_matter_for_a_warning(ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, "told-Lstm") == [[], []]


def test_what_decides_by_its_contents_is_refused(ranks: list[dict[str, Any]]) -> None:
    for (told,) in values(ranks, "told-Deciding"):
        assert "it depends on 'model.count', a state that forward carries from call to call: choose with" in told


def test_what_is_changed_in_place_is_told(ranks: list[dict[str, Any]]) -> None:
    for told in values(ranks, "told-Appending"):
        assert told[0].startswith("forward sets past (changed in place, where setting another one as in `self.past = [")


def test_a_state_of_other_rows_is_refused(ranks: list[dict[str, Any]]) -> None:
    for told in values(ranks, "whole_rows_refused"):
        assert told.startswith("with inputs=\"local\" each rank has its own rows of the state 'model.cells.0.h', which")
        assert told.endswith("it has 8 on dim 0, but this rank passes 4 rows. Set it to this rank's rows, or to None")


def test_ranks_that_set_a_state_otherwise_are_told(ranks: list[dict[str, Any]]) -> None:
    for told in values(ranks, "set_otherwise_on_ranks"):
        assert told.startswith("the ranks disagree about states of forward that the loop has set")
