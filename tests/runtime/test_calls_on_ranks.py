"""Calls that differ from the traced one, and what loops do besides calling, give the results of one process."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dtensor_support import JOINS_SPLIT_DIMS
from launch import launch, needed, values

CALLS, LOOPS, SETTINGS, HABITS = "call_cases.py", "loop_cases.py", "setting_cases.py", "habit_cases.py"
COMPLEX, WRITING, FUNCTIONAL = "complex_cases.py", "writing_cases.py", "functional_cases.py"
STATE, HOOKS, LIBRARIES = "state_cases.py", "hook_cases.py", "library_cases.py"
KINDS = {
    CALLS: (
        "local_inputs",
        "unfrozen_later",
        "gradient_of_the_input",
        "inference_mode",
        "evaluation_needs_no_training_memory",
        "copied_and_called_otherwise",
        "copied_with_gradients",
        "known_contents",
        "anomalies",
    ),
    LOOPS: (
        "buffers_bound_anew",
        "hooks_of_the_model",
        "numbers_of_parameters",
        "penalty_in_the_loop",
        "weights_of_a_plain_model",
        "dataclass_returned",
        "layers_under_vmap",
        "counts_of_kinds",
        "covariances",
        "weights_written_first",
        "adafactor",
        "step_before_backward",
    ),
    SETTINGS: (
        "synchronised_norms",
        "norm_called_twice",
        "lone_dims_dropped",
        "norms_of_rows",
        "norms_updated",
        "numbers_set",
        "stages_that_come_in",
        "functions_set",
        "configs_set",
        "tensors_set",
        "layers_set",
    ),
    HABITS: (
        "weights_put_back",
        "steps_by_hand",
        "parameters_as_a_vector",
        "data_of_a_plain_tensor",
        "values_drawn_again",
        "values_read",
        "hooks_and_flags_of_parameters",
        "state_of_one_process",
        "one_model_after_another",
    ),
    COMPLEX: ("filter_of_pairs", "complex_parameters", "filter_of_rows"),
    WRITING: (
        "clipped_around_autograd",
        "history_ended_in_place",
        "written_into_room",
        "written_at_a_step",
        "written_by_calls",
    ),
    FUNCTIONAL: ("inner_steps",),
    LIBRARIES: ("means_over_ranks", "derivatives_by_inputs", "derivatives_along", "sparse_inputs"),
    STATE: ("strided_buffers", "written_whole", "gradients_of_some", "one_gradient_of_several", "bound_anew"),
}
GRID = [(cases, kind) for cases, kinds in KINDS.items() for kind in kinds]
PRESETS = ("ddp", "fsdp", "tp")
Two = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Two:
    """The results of two ranks for each file of cases."""

    @functools.cache
    def found(cases: str) -> list[dict[str, Any]]:
        grid = [f"{kind}-{preset}" for kind in KINDS.get(cases, ()) for preset in PRESETS]
        every = importlib.import_module(Path(cases).stem).CASES[2]
        return launch(cases, 2, cases=needed(request, every, "kind", "preset", of=grid))

    return found


@pytest.mark.parametrize(
    ("cases", "kind", "preset"),
    [
        pytest.param(*one, preset, marks=[pytest.mark.slow] if (i + j) % len(PRESETS) else [])
        for i, one in enumerate(GRID)
        for j, preset in enumerate(PRESETS)
    ],
)
def test_equals_one_process(cases: str, kind: str, preset: str, two: Two) -> None:
    if (kind, preset) == ("parameters_as_a_vector", "tp") and not JOINS_SPLIT_DIMS:
        pytest.skip("torch 2.11 has no view as a vector of a matrix whose columns are split, and says so")
    for rank in two(cases):
        found = rank[f"{kind}-{preset}"]
        assert "error" not in found, found["traceback"]
        assert found["value"] < 1e-12


def test_a_planned_model_is_not_planned_again(two: Two) -> None:
    assert all("is already planned" in rank["planned_twice"]["value"] for rank in two(CALLS))


def test_of_graphs_that_give_way_nothing_is_kept(two: Two) -> None:
    for rank in two(CALLS):
        found = rank["more_kinds_than_are_kept"]["value"]
        assert found["kept"] == 16 and found["alive"] == list(range(6, 20))  # the graph of the first call is kept, too
        assert found["told"] and found["error"] < 1e-12


def test_a_number_that_changes_is_told_once(two: Two) -> None:
    for found in values(two(CALLS), "numbers_that_change"):
        assert (found["modes"], found["numbers"], found["tensors"]) == (0, 1, 0)
        assert found["error"] < 1e-6


def test_a_number_read_from_a_buffer_that_changes_is_told(two: Two) -> None:
    """The queue of momentum contrast, whose pointer `int()` reads: each place in the queue has a plan of its own."""
    for found in values(two(CALLS), "numbers_of_buffers"):
        assert not found["False"]
        (told,) = found["True"]
        assert "int() at" in told and "call_cases.py" in told and "(now 16)" in told


def test_graphs_in_use_do_not_give_way(two: Two) -> None:
    assert values(two(CALLS), "in_use_all_along") == [{"planned": 1, "batch": 4}] * 2


def test_values_set_back_are_not_planned_again(two: Two) -> None:
    for rank in two(SETTINGS):
        found = rank["set_to_and_fro"]["value"]
        assert found["plans"] == 2
        assert len(found["told"]) == 1 and "'factor' (now 0.5)" in found["told"][0]


def test_norms_keep_what_all_ranks_saw_of_micro_batches(two: Two) -> None:
    for rank in two(SETTINGS):
        found = rank["norms_of_local_micro_batches"]
        assert "error" not in found, found["traceback"]
        assert found["value"] < 1e-12


def test_who_waits_for_a_rank_to_plan_says_so(two: Two) -> None:
    waited, late = [rank["late_rank_told"] for rank in two(SETTINGS)]
    assert "error" not in waited, waited["traceback"]
    assert late["value"] == []
    assert len(waited["value"]) == 1 and "rank 0 has waited 0.1 s in autoparallelize" in waited["value"][0]


def test_parameters_are_no_values_that_change(two: Two) -> None:
    assert all(rank["plans_of_recurrent_layers"]["value"] == 1 for rank in two(SETTINGS))


def test_checkpointing_that_is_enabled_late(two: Two) -> None:
    for rank in two(SETTINGS):
        found = rank["checkpointing_enabled_late"]
        assert "error" not in found, found["traceback"]
        assert found["value"] < 1e-6


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("data_of_another_shape", "change shapes and dtypes before autoparallelize"),
        ("shards_of_rank_zero", "is given the shards of rank 0"),
    ],
)
def test_habits_that_are_refused(case: str, words: str, two: Two) -> None:
    for rank in two(HABITS):
        assert "error" not in rank[case], rank[case]["traceback"]
        messages = rank[case]["value"] if isinstance(rank[case]["value"], list) else [rank[case]["value"]]
        assert messages and all(words in message for message in messages)


def test_hooks_that_calls_would_not_run_are_refused(two: Two) -> None:
    for rank in two(HOOKS):
        late = rank["hook_registered_late"]["value"]
        assert "a hook was registered on 'up' after the model was planned" in late[0]
        assert late[1] == "no error", "once it is removed"
        assert "'down' has a backward hook" in rank["backward_hook"]["value"]
        assert "a backward hook for all modules" in rank["backward_hook_for_all"]["value"]


def test_code_that_modules_get_late_is_refused(two: Two) -> None:
    words = {
        "forward": "the method forward of 'up' was replaced after the model was planned",
        "method": "the method scaled of the model was replaced after the model was planned",
        "class": "'up' was a Linear when the model was planned, and is a Identity now",
        "forward of a class": "the method forward of 'up' was replaced after the model was planned",
        "an attribute": "no error",
        "a parameter": "'biases.1' was added after the model was planned",
    }
    for rank in two(HOOKS):
        assert "error" not in rank["code_set_late"], rank["code_set_late"]["traceback"]
        for name, (told, *behind) in rank["code_set_late"]["value"].items():
            assert words[name] in told, name
            assert behind in ([], ["no error"]), name


def test_copies_that_are_changed_before_their_first_call_are_refused(two: Two) -> None:
    words = {
        "nothing": "no error",
        "replaced": "the module 'act' was replaced or removed after",
        "added": "the module 'more.0' was added after",
        "hook": "a hook was registered on 'up' after",
        "forward": "the method forward of 'act' was replaced after the model was planned",
    }
    for found in values(two(HOOKS), "copies_changed"):
        assert found.keys() == words.keys()
        for name, (before, untouched, copied_late) in found.items():
            assert words[name] in before and words[name] in copied_late and untouched == "no error", found


def test_an_input_that_is_returned_stays_the_loops_own(two: Two) -> None:
    for found in values(two(HOOKS), "inputs_returned"):
        assert found["same"] and found["hooks"] == 0 and found["error"] == 0


def test_hooks_for_all_modules_are_told_of(two: Two) -> None:
    for rank in two(HOOKS):
        assert "error" not in rank["hooks_for_all"], rank["hooks_for_all"]["traceback"]
        found = rank["hooks_for_all"]["value"]
        assert len(found["traced"]) == 1 and "forward hooks of all modules run now" in found["traced"][0]
        assert len(found["late"]) == 1 and "registered after the model was planned" in found["late"][0]
        assert found["same"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("whole_values", "by one that is not a DTensor"),
        ("values_that_are_not_trained", "not planned yet: make one such call of the model itself first, give"),
        ("transformed", "inside a transform of torch.func"),
        ("mapped", "inside a transform of torch.func"),
        ("traced_by_jit", "torch.jit.trace follows one process"),
        ("forward_mode", "or in forward-mode AD"),
    ],
)
def test_functional_calls_that_are_refused(case: str, words: str, two: Two) -> None:
    for rank in two(FUNCTIONAL):
        assert "error" not in rank[case], rank[case]["traceback"]
        assert words in rank[case]["value"]


def test_conjugate_inputs_are_compared(two: Two) -> None:
    assert all(value < 1e-12 for value in values(two(COMPLEX), "conjugate_inputs"))


def test_vectors_over_all_parameters_are_not_loaded(two: Two) -> None:
    for rank in two(STATE):
        assert "start LBFGS again" in rank["vectors_of_one_process"]["value"], rank["vectors_of_one_process"]


@pytest.mark.parametrize("preset", PRESETS)
def test_an_error_inside_leaves_the_modes_of_the_loop(preset: str, two: Two) -> None:
    for rank in two(STATE):
        found = rank[f"error_inside-{preset}"]
        assert "error" not in found, found["traceback"]
        assert all(found["value"]), found["value"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_replay_and_a_state_of_torch_draw_the_same_numbers(preset: str, two: Two) -> None:
    assert values(two(STATE), f"replayed-{preset}") == [[True] * 8] * 2


def test_shards_that_each_rank_has_saved_are_loaded(two: Two) -> None:
    assert all(rank["own_shards"]["value"] is True for rank in two(HABITS))


def test_advice_stands_below_an_error_that_ends_a_process() -> None:
    script = (
        "from autopar.runtime.dtensors.advice import advise\n"
        "advise()\n"
        "raise RuntimeError('aten.add.Tensor got mixed torch.Tensor and DTensor')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.stderr.splitlines()[-2].endswith("got mixed torch.Tensor and DTensor")
    assert run.stderr.splitlines()[-1].startswith("autopar: parameters and gradients of a planned model are DTensors")
