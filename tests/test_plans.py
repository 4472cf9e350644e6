"""A plan survives JSON, and anything that is no plan is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.layout import Layout
from autopar.plan_forms.checks import check_on_graph
from autopar.plans import Plan
from autopar.tracing import trace


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    cluster = autopar.Cluster.preset("cpu", shape=(2, 2), axis_names=("dp", "tp"))
    return autopar.plan(model, {"input": torch.ones(8, 8)}, cluster)


@pytest.fixture(scope="module")
def sharded() -> Plan:
    """A plan with buckets and collectives."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    cluster = autopar.Cluster.preset("cpu", shape=(2, 2), axis_names=("dp", "tp"))
    return autopar.plan(model, {"input": torch.ones(8, 8)}, cluster, constraints="fsdp", loss_fn=torch.sum)


def test_json_and_back_is_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert (again.nodes, again.parameters, again.predicted) == (plan.nodes, plan.parameters, plan.predicted)


def test_plans_that_only_tell_other_things_are_the_same_for_ranks(plan: Plan) -> None:
    slower = replace(plan, planning_seconds={"solve": 9.0}, notes=("slow",))
    assert slower.essence() == plan.essence() and slower.to_json() != plan.to_json()
    assert replace(plan, micro_batches=2).essence() != plan.essence()
    assert replace(plan, nodes=plan.nodes[:-1]).essence() != plan.essence()


def test_what_cannot_be_written_says_where(plan: Plan, tmp_path: Path) -> None:
    cluster = autopar.Cluster.preset("cpu", shape=(2, 2))
    for what, save in (("plan", plan.save), ("report", plan.to_html), ("cluster", cluster.save)):
        with pytest.raises(InputError, match=f"the {what} cannot be written to .*no folder {tmp_path}/runs: make it"):
            save(tmp_path / "runs" / "file")
        with pytest.raises(InputError, match=f"the {what} cannot be written to {tmp_path}: .*Is a directory"):
            save(tmp_path)
        with pytest.raises(InputError, match=f"the {what} is written to a path, and int is none"):
            save(3)  # type: ignore[arg-type]


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
        (lambda text: "[]", "is not a plan: a plan has a version"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "plan version 99"),
        (
            lambda text: json.dumps({**json.loads(text), "nodes": [{"name": "x"}]}),
            "nodes lacks position, target, .* 4 more",
        ),
        (
            lambda text: json.dumps({"version": 1}),
            "it lacks mesh_shape, axis_names, cluster and 15 more",
        ),
        (lambda text: json.dumps({**json.loads(text), "axis_names": ["dp"]}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "unheard_of": 1, "certificate": 3}), "damaged"),
        (lambda text: json.dumps({**json.loads(text), "memory_budget_bytes": "8GiB"}), "bytes holds '8GiB', .* no int"),
        (lambda text: json.dumps({**json.loads(text), "micro_batches": True}), "micro_batches holds True"),
        (lambda text: json.dumps({**json.loads(text), "micro_batches": 1.5}), "micro_batches holds 1.5, .* no int"),
        (lambda text: json.dumps({**json.loads(text), "constraints": "ddp"}), "constraints holds 'ddp', .* no list"),
    ],
)
def test_what_is_no_plan_is_refused(damage: object, message: str, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(damage(plan.to_json()))  # type: ignore[operator]
    with pytest.raises(autopar.PlanMismatchError, match=message) as refused:
        Plan.load(path)
    assert str(path) in str(refused.value)


def _first(kind: str, name: str, value: object) -> Callable[[dict[str, Any]], None]:
    """A function that damages one field of the first parameter, node, bucket, ..."""
    return lambda data: data[kind][0].update({name: value})


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a dim that is not there": (
        _first("parameters", "storage", "S9,R"),
        r"parameter '0.weight', of shape .* layout S9,R",
    ),
    "a layout of one axis": (
        _first("parameters", "storage", "R"),
        "'0.weight' has layout R, for 1 axes, and the mesh 2",
    ),
    "a partial storage": (_first("parameters", "storage", "P,R"), "'0.weight' is stored as P,R, which is no storage"),
    "a parameter twice": (lambda data: data["parameters"].append(data["parameters"][0]), "'0.weight' is there twice"),
    "a result": (_first("nodes", "outputs", ["S9,R"]), "result 0 of node '[^']+', of shape .* cannot have layout S9,R"),
    "an uneven digit": (_first("nodes", "outputs", ["S0@3,R"]), "result 0 of node .* cannot have layout S0@3,R"),
    "results": (_first("nodes", "outputs", []), "has 0 layouts of results, and 1 shapes"),
    "factors": (_first("nodes", "factors", ["b"]), "has 1 factors on 2 axes"),
    "a position": (_first("nodes", "position", -3), "has position -3"),
    "the mesh": (lambda data: data.update(mesh_shape=[2, 4]), "the axes of cluster have the sizes"),
    "no devices": (lambda data: data.update(mesh_shape=[2, 0]), "mesh_shape is .2, 0., and every axis has 1"),
    "the names of axes": (lambda data: data.update(axis_names=["dp", "dp"]), "the names of its axes, dp, dp, differ"),
    "the names of axes in the cluster": (
        lambda data: data["cluster"]["axes"][0].update(name="pp"),
        "axis_names is .'dp', 'tp'., and the axes of cluster are .'pp', 'tp'.",
    ),
    "no device": (lambda data: data["cluster"].update(device=None), "cluster: not a cluster: it has no device"),
    "text for a device": (lambda data: data["cluster"].update(device="x"), "cluster: not a cluster: it has no device"),
    "no axes": (lambda data: data["cluster"].update(axes=None), "cluster: not a cluster: it has no list of axes"),
    "a rate": (
        lambda data: data["cluster"]["axes"][1].update(bytes_per_s=-1.0),
        "cluster: axis 'tp': bytes_per_s is -1.0, and must be",
    ),
    "a gap": (lambda data: data["certificate"].update(gap=-3.0), "certificate has gap of -3.0"),
    "a peak": (lambda data: data["predicted"].update(peak_bytes=1), "predicted has a peak of 1 bytes, and parts of"),
    "spreads": (lambda data: data["cluster"].update(spreads="x"), "cluster: cluster: spreads is 'x', and must be"),
    "no fingerprints": (lambda data: data.update(fingerprints={}), "fingerprints has none of the graph"),
    "fingerprints": (lambda data: data["fingerprints"].pop("graph"), "has none of the graph"),
    "micro-batches": (lambda data: data.update(micro_batches=-1), "micro_batches is -1, and must be 1 or more"),
    "inputs": (lambda data: data.update(inputs="some"), "inputs is 'some', and must be"),
    "a budget": (lambda data: data.update(memory_budget_bytes=-5), "memory_budget_bytes is -5"),
    "precision": (lambda data: data["precision"].update(compute="int9"), "precision is .*int9"),
    "seconds": (lambda data: data["predicted"].update(step_seconds=-1.0), "predicted has step_seconds of -1.0"),
    "bytes": (_first("collectives", "bytes", -8), "has bytes of -8, and must have 0 or more"),
    "an axis": (_first("collectives", "axis", 7), "is on axis 7, of 2"),
    "a bucket that is not there": (_first("collectives", "cause", "bucket 99"), "is for 'bucket 99', of "),
    "a name in a bucket": (_first("buckets", "names", ["nobody"]), "bucket 0 holds 'nobody'|bucket 0 has 1 names and"),
    "the segment of a bucket": (_first("buckets", "segment", 5), "bucket 0 is of segment 5, of 0 in the plan"),
    "a bucket twice": (
        lambda data: data["buckets"].append(data["buckets"][0]),
        r"bucket \d+ holds '[^']+' as [^,]+,[^,]+, and bucket 0 too",
    ),
    "a collective twice": (
        lambda data: data["collectives"].append(data["collectives"][0]),
        r"[a-z_]+ of \d+ bytes on axis \d for '[^']+' .forward. is there twice",
    ),
    "a collective that is cut": (
        lambda data: data["collectives"].pop(),
        r"its collectives take .* s without those of replays, and predicted has comm_seconds of .* are missing",
    ),
    "a segment twice": (
        lambda data: data.update(recompute=[{"first": 1, "last": 2, "name": "block"}] * 2),
        "segment 'block' begins at node 1, and 'block' ends at 2",
    ),
    "a segment": (
        lambda data: data.update(recompute=[{"first": 9, "last": 4, "name": "block"}]),
        "segment 'block' goes from node 9 to 4",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_field_is_named_with_its_place(damage: str, sharded: Plan) -> None:
    change, message = DAMAGES[damage]
    data = json.loads(sharded.to_json())
    change(data)
    with pytest.raises(autopar.PlanMismatchError, match=rf"is a damaged plan \(.*{message}.*: take it as it was saved"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ("S9,R", "R,R")}, r"input 0 of node '[^']+', of shape .*, cannot have layout S9,R"),
        ({"inputs": ()}, r"has 0 layouts of inputs, in the graph \d inputs"),
        ({"target": "no.such.function"}, r"is of no\.such\.function, in the graph of "),
        ({"shapes": ((7, 7),), "outputs": ("R,R",)}, r"has results of shapes \(\(7, 7\),\), in the graph "),
        ({"position": 0}, r"says nothing about node|is of .*, in the graph of "),
        ({"position": 1000}, "has position 1000, and the graph "),
    ],
)
def test_nodes_are_those_of_the_graph(changes: dict[str, Any], message: str, plan: Plan) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    graph = trace(model, {"input": torch.ones(8, 8)}, bias_addition_split=True, remove_inplace=True).graph
    check_on_graph(plan, graph)
    number = next(i for i, node in enumerate(plan.nodes) if len(node.inputs) == 2)
    for name in ("inputs", "outputs"):
        if name in changes:
            changes = {**changes, name: tuple(map(Layout.parse, changes[name]))}
    nodes = [*plan.nodes]
    nodes[number] = replace(nodes[number], **changes)
    with pytest.raises(autopar.PlanMismatchError, match=message):
        check_on_graph(replace(plan, nodes=tuple(nodes)), graph)


def _cut_node(plan: Plan) -> Plan:
    return replace(plan, nodes=plan.nodes[:-1])


def _cut_replay(plan: Plan) -> Plan:
    """Removes a collective of a replay, whose seconds are recorded nowhere else in the file."""
    cut = next(one for one in plan.collectives if one.phase == "replay")
    return replace(plan, collectives=tuple(one for one in plan.collectives if one is not cut))


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (_cut_node, r"it says nothing about node 'output' at position \d+ of the graph"),
        (_cut_replay, r"it announces 0 [a-z_]+ of \d+ bytes on axis \d for '[^']+' .replay., and .* makes \d+"),
    ],
)
def test_what_only_the_graph_tells_is_found_where_a_step_is_simulated(
    damaged: Callable[[Plan], Plan], message: str
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3)))
    examples, cluster = {"input": torch.ones(8, 8)}, autopar.Cluster.preset("cpu", shape=(2, 2))
    asked = {"constraints": "fsdp+tp(recompute=full)", "loss_fn": torch.sum}
    made = autopar.plan(model, examples, cluster, **asked)  # type: ignore[arg-type]
    assert autopar.simulate(model, examples, made, loss_fn=torch.sum).step_seconds > 0
    loaded = Plan.from_json(damaged(made).to_json())
    with pytest.raises(autopar.PlanMismatchError, match=message):
        autopar.simulate(model, examples, loaded, loss_fn=torch.sum)


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
