"""A plan survives JSON, and what is no plan is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.plans import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    cluster = autopar.Cluster.preset("cpu", shape=(2, 2), axis_names=("dp", "tp"))
    return autopar.plan(model, {"input": torch.ones(8, 8)}, cluster)


def test_json_and_back_is_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert (again.nodes, again.parameters, again.predicted) == (plan.nodes, plan.parameters, plan.predicted)


def test_the_same_input_gives_the_same_plan(plan: Plan) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    cluster = autopar.Cluster.preset("cpu", shape=(2, 2), axis_names=("dp", "tp"))
    again = autopar.plan(model, {"input": torch.ones(8, 8)}, cluster)
    assert again.nodes == plan.nodes
    assert again.parameters == plan.parameters
    assert again.predicted == plan.predicted


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not a plan"),
        (lambda text: "[]", "plan version None"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "plan version 99"),
        (lambda text: json.dumps({**json.loads(text), "nodes": [{"name": "x"}]}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "axis_names": ["dp"]}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "unheard_of": 1, "certificate": 3}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "memory_budget_bytes": "8GiB"}), "bytes holds '8GiB', .* no int"),
        (lambda text: json.dumps({**json.loads(text), "micro_batches": True}), "micro_batches holds True"),
        (lambda text: json.dumps({**json.loads(text), "constraints": "ddp"}), "constraints holds 'ddp', .* no list"),
    ],
)
def test_what_is_no_plan_is_refused(damage: object, message: str, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(damage(plan.to_json()))  # type: ignore[operator]
    with pytest.raises(autopar.PlanMismatchError, match=message) as refused:
        Plan.load(path)
    assert str(path) in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(autopar.InputError, match=r"no plan can be read from .*Plan\.save.*autopar plan") as refused:
            Plan.load(path)
        assert str(path) in str(refused.value)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(autopar.InputError, match="no plan can be read"):
        Plan.load(tmp_path / "bytes")


def test_an_interactive_session_shows_one_line(plan: Plan) -> None:
    assert repr(plan).startswith("<Plan: ") and len(repr(plan)) < 120
    assert "\n" not in repr(plan) and repr(plan) in repr([plan])
