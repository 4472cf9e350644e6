"""Presets compared with the chosen plan: same plans as when asked for alone, never faster, memory needs reported."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, InfeasibleError, InputError, Plan, TimeLimitError
from autopar.planning.comparison import tradeoff
from autopar.planning.mesh_search import factorisations
from autopar.planning.micro_batches import prepared_for
from autopar.planning.stages import Prepared, request_of

PRESETS = ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp")


class Perceptron(nn.Module):
    """Its weights are larger than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.second(torch.relu(self.first(x))), y)


def _problem() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Perceptron(), {"x": torch.empty(64, 256), "y": torch.empty(64, 256)}


def _cluster(*shape: int) -> Cluster:
    return Cluster.preset("cpu", shape)


@pytest.fixture(scope="module")
def compared() -> Plan:
    model, inputs = _problem()
    return autopar.compare(model, inputs, _cluster(2, 2))


def test_each_preset_is_the_plan_that_it_is_alone(compared: Plan) -> None:
    assert [a.name for a in compared.comparison] == list(PRESETS)
    for alternative in compared.comparison:
        model, inputs = _problem()
        alone = autopar.plan(model, inputs, _cluster(2, 2), constraints=alternative.name)
        assert alternative.predicted == replace(alone.predicted, moments=())
        assert alternative.comm_bytes == sum(c.bytes * c.count for c in alone.collectives)


def test_no_preset_is_faster_than_the_plan(compared: Plan) -> None:
    for alternative in compared.comparison:
        assert alternative.predicted is not None
        assert compared.predicted.step_seconds <= alternative.predicted.step_seconds * (1 + 1e-3)


def test_what_does_not_fit_says_what_it_needs(compared: Plan) -> None:
    presets = {a.name: a.predicted for a in compared.comparison}
    assert presets["fsdp"] is not None and presets["ddp"] is not None
    budget = (presets["fsdp"].peak_bytes + presets["ddp"].peak_bytes) // 2
    model, inputs = _problem()
    tight = autopar.compare(model, inputs, _cluster(2, 2), memory_budget=budget, against=("ddp", "fsdp"))
    ddp, fsdp = tight.comparison
    assert fsdp.fits and fsdp.predicted is not None and fsdp.predicted.peak_bytes <= budget
    assert not ddp.fits and ddp.predicted is not None and ddp.predicted.peak_bytes > budget
    assert ddp.predicted == presets["ddp"]
    assert ddp.smallest_budget_bytes is not None
    assert budget < ddp.smallest_budget_bytes <= ddp.predicted.peak_bytes * (1 + 1e-4)
    assert tight.predicted.peak_bytes <= budget


def test_a_preset_that_needs_two_axes_says_so_on_one() -> None:
    model, inputs = _problem()
    hsdp, ddp = autopar.compare(model, inputs, _cluster(2), against=("hsdp", "ddp")).comparison
    assert hsdp.predicted is None and not hsdp.fits and "two axes" in hsdp.note
    assert ddp.fits
    assert [a.name for a in autopar.compare(*_problem(), _cluster(2)).comparison] == ["ddp", "fsdp", "tp"]


def test_pins_hold_for_the_presets_too() -> None:
    model, inputs = _problem()
    constraints = ("param:second.weight = R", "ddp")
    ddp, fsdp, tp = autopar.compare(
        model, inputs, _cluster(2), constraints=constraints, against=("ddp", "fsdp", "tp")
    ).comparison
    assert ddp.fits
    assert fsdp.predicted is None and "param:second.weight" in fsdp.note
    assert tp.fits  # the pinned constraint "ddp" does not apply here: the compared preset replaces it


def test_why_not_otherwise() -> None:
    """The best plan that meets a pin is the plan with the pin as a constraint, never faster than the free plan."""
    model, inputs = _problem()
    pins = ("param:first.weight = S1", "activation:first = R")
    made = autopar.compare(model, inputs, _cluster(2), against=pins)
    for pin, other in zip(pins, made.comparison, strict=True):
        alone = autopar.plan(model, inputs, _cluster(2), constraints=pin)
        assert other.name == pin and other.fits and other.predicted is not None
        assert other.predicted.step_seconds == pytest.approx(alone.predicted.step_seconds, rel=1e-3)
        assert other.predicted.step_seconds >= made.predicted.step_seconds * (1 - 1e-3)


def test_no_such_preset() -> None:
    model, inputs = _problem()
    with pytest.raises(InputError, match="'zero9' is no preset"):
        autopar.compare(model, inputs, _cluster(2), against=("zero9",))


def test_a_comparison_is_kept_in_json(compared: Plan) -> None:
    assert Plan.from_json(compared.to_json()).comparison == compared.comparison


def test_more_budget_costs_no_time() -> None:
    model, inputs = _problem()
    made = autopar.compare(model, inputs, _cluster(2), against=(), tradeoff=4)
    budgets = [point.budget_bytes for point in made.tradeoff]
    assert len(budgets) == 4 and budgets == sorted(budgets)
    seconds = [point.step_seconds for point in made.tradeoff]
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in itertools.pairwise(seconds))
    assert all(point.peak_bytes <= point.budget_bytes for point in made.tradeoff)
    assert seconds[-1] == pytest.approx(made.predicted.step_seconds, rel=1e-3)  # the device has enough memory
    alone = autopar.plan(*_problem(), _cluster(2), memory_budget=budgets[1])
    assert alone.predicted.step_seconds == pytest.approx(seconds[1], rel=1e-3)
    with pytest.raises(InfeasibleError):
        autopar.plan(*_problem(), _cluster(2), memory_budget=budgets[0] * 95 // 100)
    assert Plan.from_json(made.to_json()).tradeoff == made.tradeoff


def test_a_curve_has_two_points() -> None:
    model, inputs = _problem()
    with pytest.raises(InputError, match="2 or more"):
        autopar.compare(model, inputs, _cluster(2), against=(), tradeoff=1)


def test_what_cannot_be_compared_is_refused_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> Plan:
        raise AssertionError("it was planned")

    monkeypatch.setattr("autopar.planning.stages.Prepared.solve", never)
    for options in ({"tradeoff": 1}, {"tradeoff": -2}, {"against": "zero9"}, {"against": [3]}):
        with pytest.raises(InputError, match=r"2 or more|'zero9' is no preset|against is \[3\]"):
            autopar.compare(*_problem(), _cluster(2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("param:first.weight S0", "no pin: .* 'kind:pattern = layout'"),
        ("weights:* = S0", "no pin"),
        ("leaf:first", "no pin"),
        ("fsdp(zero=9)", "'zero=9' is no option of 'fsdp'"),
        ("fsdp(zero", "is none of ddp"),
        ("param:third.* = S0", "matches nothing: no parameter is called"),
        ("param:* = Q", "'param:[*] = Q': "),
        ("param:* = S7", "has 8 dims"),
        ("axis:tp = tp", "the mesh's axes are called"),
        ("axis:0 = pp", "'pp' is none of"),
        ("recompute:first = full", "this model has none"),
    ],
)
def test_bad_input_to_compare_with_is_an_error_and_no_note(asked: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        autopar.compare(*_problem(), _cluster(2), against=["ddp", asked])


def test_one_name_to_compare_with_is_one() -> None:
    made = autopar.compare(*_problem(), _cluster(2), against="fsdp")
    assert [alternative.name for alternative in made.comparison] == ["fsdp"]


def test_factorisations_multiply_to_the_devices() -> None:
    for devices in (1, 2, 12, 64):
        found = list(factorisations(devices, 3))
        assert len(set(found)) == len(found)
        assert all(torch.Size(shape).numel() == devices for shape in found)
        assert all(1 not in shape for shape in found if len(shape) > 1)
    assert len(list(factorisations(64, 3))) == 1 + 5 + 10  # compositions of 2^6


def test_the_search_finds_what_planning_each_mesh_finds() -> None:
    model, inputs = _problem()
    results = autopar.search(model, inputs, "cpu", 4)
    assert {result.mesh_shape for result in results} == {(4,), (2, 2)}
    seconds = []
    for result in results:
        alone = autopar.plan(*_problem(), _cluster(*result.mesh_shape))
        assert result.plan is not None
        assert result.plan.predicted == alone.predicted
        seconds.append(alone.predicted.step_seconds)
    assert seconds == sorted(seconds)


def test_a_search_in_which_nothing_fits_says_what_is_needed() -> None:
    model, inputs = _problem()
    (result,) = autopar.search(model, inputs, "cpu", 2, memory_budget="100KiB")
    assert result.plan is None and result.smallest_budget_bytes is not None
    assert result.smallest_budget_bytes > 100 * 1024


@pytest.mark.parametrize("constraint", ["hsdp", "param:first.weight = S0,R"])
def test_a_mesh_that_a_constraint_does_not_suit_is_noted(constraint: str) -> None:
    found = {r.mesh_shape: r for r in autopar.search(*_problem(), "cpu", 4, constraints=constraint)}
    assert found[2, 2].plan is not None
    assert found[4,].plan is None and found[4,].note and found[4,].smallest_budget_bytes is None


def test_what_no_mesh_can_be_asked_is_an_error() -> None:
    with pytest.raises(InputError, match="matches nothing"):
        autopar.search(*_problem(), "cpu", 4, constraints="param:nowhere = R")
    with pytest.raises(InputError, match="hsdp"):
        autopar.search(*_problem(), "cpu", 2, constraints="hsdp")


def test_results_without_a_plan_have_both_bounds() -> None:
    (result,) = autopar.search(*_problem(), "cpu", 2, memory_budget="100KiB")
    made = autopar.compare(*_problem(), _cluster(2), against="ddp", memory_budget=result.smallest_budget_bytes)
    for one in (result, *made.comparison):
        assert one.smallest_budget_bytes is not None and one.budget_lower_bound_bytes is not None
        assert 0 < one.budget_lower_bound_bytes <= one.smallest_budget_bytes


def test_a_budget_whose_plan_is_not_found_in_time_is_left_out_of_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _problem()
    solve, asked = Prepared.solve, list[int]()

    def slow(prepared: Prepared, *, memory_budget_bytes: int) -> Plan:
        asked.append(memory_budget_bytes)
        if len(asked) == 4:  # fourth: after the plans without a budget, of the least one, and of the first point
            raise TimeLimitError("the solver found no plan")
        return solve(prepared, memory_budget_bytes=memory_budget_bytes)

    request = request_of(_cluster(2, 2))
    [ready] = prepared_for(1, model, inputs, None, request)
    monkeypatch.setattr(Prepared, "solve", slow)
    with pytest.warns(UserWarning, match="the curve has no plan for a budget of"):
        points = list(tradeoff(ready, 4))
    assert [point.budget_bytes for point in points] == [asked[2], asked[4], points[-1].peak_bytes]


def test_a_smallest_budget_above_the_fastest_plans_begins_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time to search for a smaller one, the reported smallest budget may exceed the fastest plan's peak. The
    curve then had falling budgets, and a budget without a plan ended it with an error."""
    model, inputs = _problem()
    [ready] = prepared_for(1, model, inputs, None, request_of(_cluster(2)))
    solve, most = Prepared.solve, ready.solve(memory_budget_bytes=1 << 40).predicted.peak_bytes

    def unlucky(self: Prepared, **options: int) -> Plan:
        if options["memory_budget_bytes"] < most:
            raise InfeasibleError("no plan fits", smallest_budget_bytes=2 * most, budget_lower_bound_bytes=1)
        return solve(self, memory_budget_bytes=options["memory_budget_bytes"])

    monkeypatch.setattr(Prepared, "solve", unlucky)
    assert [point.budget_bytes for point in tradeoff(ready, 3)] == [most] * 3


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="the model is of NoneType"):
        autopar.plan(None, {}, _cluster(2))  # type: ignore[arg-type]
