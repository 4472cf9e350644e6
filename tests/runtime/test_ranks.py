"""The runtime on real ranks under hand-made plans: one launch for each world size runs all cases of `rank_cases`."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, needed
from rank_cases import CASES
from thinned import every

STYLES = ("dp", "tp", "fsdp")
KINDS = ("", "+recompute", "+regather")
ON_LINE = [style + kind for style in STYLES for kind in KINDS]
ON_SQUARE = [styles + kind for styles in ("dpxtp", "tpxfsdp", "dpxfsdp", "fsdpxfsdp") for kind in KINDS]
EXACT = 1e-9  # relative error in float64 after several AdamW steps


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.getbasetemp() / "checkpoint"
    cases = needed(request, CASES[4], "on_four", of=ON_LINE + ON_SQUARE)
    return launch("rank_cases.py", 4, cases=cases, environment={"CHECKPOINT": str(folder)})


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, four: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.getbasetemp() / "checkpoint"  # saved by the four ranks
    cases = needed(request, CASES[2], "on_two", of=ON_LINE)
    return launch("rank_cases.py", 2, cases=cases, environment={"CHECKPOINT": str(folder)})


def value(ranks: list[dict[str, Any]], case: str) -> Any:
    """The result of a case, which must not fail on any rank."""
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
    return ranks[0][case]["value"]


def check_equal(found: dict[str, Any]) -> None:
    assert found["loss_error"] < EXACT and found["parameter_error"] < EXACT
    assert found["gradients_lie_as_parameters"]
    assert found["counted"] == found["announced"]


@pytest.mark.parametrize("on_two", every(2, ON_LINE))
def test_two_ranks_equal_one_process(on_two: str, two: list[dict[str, Any]]) -> None:
    check_equal(value(two, on_two))


@pytest.mark.parametrize("on_four", every(2, ON_LINE + ON_SQUARE))
def test_four_ranks_equal_one_process(on_four: str, four: list[dict[str, Any]]) -> None:
    check_equal(value(four, on_four))


def test_the_model_stays_the_users_object(two: list[dict[str, Any]]) -> None:
    found = value(two, "model_stays_the_users")
    assert all(found[name] is True for name in ("isinstance", "signature", "repr", "keys", "twin_untouched"))
    assert found["twin_runs"] < EXACT
    assert found["buffer"] == [2.0] * 4


def test_fused_optimizer(two: list[dict[str, Any]]) -> None:
    assert value(two, "fused_optimizer") < EXACT


def test_buckets_move_together(two: list[dict[str, Any]]) -> None:
    for name, found in value(two, "in_buckets").items():
        check = dict(found)
        alone, together = check.pop("counted_alone"), check.pop("counted")
        assert found["loss_error"] < EXACT and found["parameter_error"] < EXACT, name
        assert found["gradients_lie_as_parameters"]
        assert together.keys() == alone.keys()
        assert {kind: volume for kind, (_, volume) in together.items()} == {k: v for k, (_, v) in alone.items()}
        assert sum(calls for calls, _ in together.values()) < sum(calls for calls, _ in alone.values())


def test_what_two_axes_gather_is_under_way_before_its_use(four: list[dict[str, Any]]) -> None:
    found = value(four, "gathers_over_two_axes")
    logs = [rank["gathers_over_two_axes"]["value"]["log"] for rank in four]
    assert all(log == logs[0] for log in logs), "collectives come in one order on all ranks"
    for key in ("loss_error", "parameter_error"):
        assert found["bucketed"][key] < EXACT
    stretches = " ".join(logs[0]).split("product")
    assert [stretch.split() for stretch in stretches] == [
        ["begin0", "begin0", "begin0", "wait0", "begin1", "wait1", "wait0", "begin1"],
        ["wait1", "wait0", "begin1"],  # the second bucket: its last gather was hidden behind the first product
        ["wait1"],
        [],
    ]


def test_a_step_is_left_out_by_all(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["step_left_out"]["value"]
        assert found["steps"] == [0, 0, 1, 1, 3, 3]
        assert found["error"] < EXACT


def test_gradients_move_once_a_step(two: list[dict[str, Any]]) -> None:
    found = value(two, "accumulation")
    assert found["error"] < EXACT
    for key, moved in found["moved"].items():
        assert moved == (2 if key.endswith("2") else 0), f"two buckets, in the last backward of a step: {key}"
    assert value(two, "accumulation_over_shapes") < EXACT


def test_an_optimizer_does_not_step_past_gradients_that_wait(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["steps_too_early"]["value"]
        assert list(found) == ["early"] and "1 of the plan's 2 backward passes" in found["early"]


def test_gradients_that_wait_are_zeroed_with_the_others(two: list[dict[str, Any]]) -> None:
    for name, error in value(two, "zeroed_between").items():
        assert error < EXACT, name


def test_a_step_with_a_closure_takes_its_gradients(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["closures"]["value"]
        assert found["error"] < EXACT
        assert "1 of the plan's 2 backward passes" in found["told"]


def test_unusual_backwards(two: list[dict[str, Any]]) -> None:
    for name, error in value(two, "unusual_backwards").items():
        assert error < EXACT, name


def test_calls_that_are_dropped_leave_nothing(two: list[dict[str, Any]]) -> None:
    assert set(value(two, "dropped_calls").values()) == {0}


def test_compiled_with_graph_breaks(two: list[dict[str, Any]]) -> None:
    assert all(error < EXACT for error in value(two, "compiled").values())


def test_other_calls_are_planned_once_each(two: list[dict[str, Any]]) -> None:
    found = value(two, "other_calls")
    assert found["error"] < EXACT
    assert found["calls"] == [[True, True]] * 2, "replan sees the user's class and plain parameters, once for each kind"


def test_local_inputs_are_parts_of_the_batch(two: list[dict[str, Any]]) -> None:
    assert value(two, "local_inputs") < EXACT


def test_sharded_outputs_are_dtensors(two: list[dict[str, Any]]) -> None:
    found = value(two, "sharded_output")
    assert found["type"] == "DTensor" and found["shape"] == [8, 4]
    assert found["loss_error"] < EXACT and found["gradient_error"] < EXACT


def test_mixed_precision(two: list[dict[str, Any]]) -> None:
    found = value(two, "mixed_precision")
    assert found["loss"] == "torch.bfloat16"
    assert found["gradients"] == ["torch.float32"]
    assert "all_gather_into_tensor_out torch.bfloat16" in found["collectives"]
    assert "reduce_scatter_tensor torch.float32" in found["collectives"]
    assert "all_gather_into_tensor_out torch.float32" not in found["collectives"]
    assert found["error"] < 0.05


def test_recompute_and_regather_free_memory(two: list[dict[str, Any]]) -> None:
    found = value(two, "memory")
    float64, rows = 8, 4
    assert found["dp"] - found["dp+recompute"] == rows * (16 + 8) * float64, "the first tanh and its input are not kept"
    assert found["fsdp"] - found["fsdp+regather"] == (8 * 16 + 4 * 8) * float64, (
        "gathered `down` and `head` are not kept"
    )
    assert found["fsdp+recompute"] < found["fsdp"] - 8 * 16 * float64, "nor is what a segment gathers"


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        ("another_plan", "PlanMismatchError", "make it once and load its file on all ranks"),
        ("another_mesh", "PlanMismatchError", "mesh of (4,), this one is (2,)"),
        ("another_graph", "PlanMismatchError", "another graph"),
        ("another_batch", "PlanMismatchError", "every rank passes the same"),
        ("early_optimizer", "InputError", "optimizer"),
        ("solver_fails", "InfeasibleError", "smallest is 7"),
    ],
)
def test_every_rank_gets_the_error(mistake: str, kind: str, words: str, two: list[dict[str, Any]]) -> None:
    value(two, "ranks_disagree")
    for rank in two:
        met = rank["ranks_disagree"]["value"][mistake]
        assert met.startswith(kind) and words in met


def test_a_failing_rank_stops_the_others(two: list[dict[str, Any]]) -> None:
    value(two, "ranks_disagree")
    first, second = (rank["ranks_disagree"]["value"]["one_rank_fails"] for rank in two)
    assert second == "ValueError: the disk is full"
    assert first == "PlanMismatchError: rank 1 failed, so this rank stops too: the disk is full"


def test_a_checkpoint_of_four_ranks_loads_on_two(two: list[dict[str, Any]]) -> None:
    found = value(two, "load_checkpoint")
    assert found["loaded"] < EXACT and found["after_training_on"] < EXACT
