"""Constraints that can never have an effect cause a warning; those that no tensor can meet are refused."""

from __future__ import annotations

import warnings
from typing import Literal

import pytest
import torch
from torch import nn
from toys import Beside, Random, cluster, on_meta, planned, stack, toy

from autopar import plan
from autopar.errors import InfeasibleError, InputError
from autopar.solver.constraints.idle_constraints import ConstraintWarning


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("param:head.weight ~ P", r"'head.weight' cannot have this layout, only R or S0 or S1$"),
        ("param:blocks.* != P", r"'blocks.0.up.weight' cannot .*; nor can any other tensor that it names$"),
        ("param:head.weight ~ S1@7", "'head.weight' cannot have this layout"),
        ("param:head.weight != S1@7", "'head.weight' cannot have this layout"),
        ("input:* ~ S0", 'cannot have this layout, only R: inputs="local" has each rank pass its rows, .* the whole$'),
        ("input:* != S0", "cannot have this layout, only R: "),
        ("output:* ~ P", "'output' cannot have this layout"),
        ("activation:blocks.0.norm != S1@3", "of 'blocks.0.norm' cannot have this layout"),
        ("param:* = *", "it leaves every axis free"),
        ("activation:head ~ *", "it leaves every axis free"),
    ],
)
def test_what_changes_nothing_is_told_and_changes_nothing(text: str, told: str) -> None:
    problem = stack(2)
    with pytest.warns(ConstraintWarning, match=f"changes nothing: .*{told}") as found:
        plan = planned(problem, text)
    assert len(found) == 1
    assert f"constraint '{text}'" in str(found[0].message)
    free = planned(problem)
    assert (plan.nodes, plan.parameters) == (free.nodes, free.parameters)


@pytest.mark.parametrize("sign", ["~", "!="])
def test_what_some_can_have_is_not_told_whatever_else_is_asked(sign: str) -> None:
    problem = stack(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstraintWarning)
        planned(problem, f"param:* {sign} S1")  # biases have only one dim, so S1 does not apply to them
        planned(problem, f"param:head.weight {sign} S1", "param:head.weight = S0")  # a pin is stronger
        planned(problem, f"param:head.weight {sign} R", "fsdp")


def test_on_an_axis_of_one_device_all_placements_are_alike() -> None:
    problem = stack(2, 1)
    rows, columns, whole = "S0,R", "S1,R", "R,R"
    for text, layouts in (("= S0", [rows]), ("~ S0", [rows]), ("!= R", [rows, columns]), ("!= S0", [whole, columns])):
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConstraintWarning)
            plan = planned(problem, f"param:head.weight {text}")
        assert {str(p.storage) for p in plan.parameters if p.name == "head.weight"} <= {*layouts}
    for sign in ("=", "~", "!="):
        told = "'head.weight' cannot have" if sign == "!=" else "it speaks of axes of one device, which split nothing"
        with pytest.warns(ConstraintWarning, match=f"changes nothing: {told}"):
            planned(problem, f"param:head.weight {sign} *,S0")


@pytest.mark.parametrize("sign", ["=", "!=", "~"])
def test_what_has_no_such_dim_is_refused_whatever_the_sign(sign: str) -> None:
    for text, what in (
        (f"param:* {sign} S5", "no parameter that it names has 6 dims"),
        (f"input:* {sign} S3", "no input that it names has 4 dims"),
        (f"output:0 {sign} S7", "no output that it names has 8 dims"),
        (f"activation:head {sign} S4", "nothing that these modules give has 5 dims"),
    ):
        with pytest.raises(InputError, match=what):
            planned(stack(2), text)


@pytest.mark.parametrize("sign", ["=", "!=", "~"])
def test_axes_that_the_mesh_lacks_are_refused_by_the_names_of_those_it_has(sign: str) -> None:
    with pytest.raises(InputError, match="has 3 placements, and the axes of the mesh are axis0, axis1: write one"):
        planned(stack(2, 2), f"param:* {sign} S0,R,R")


def test_a_pin_that_nothing_can_meet_cannot_hold() -> None:
    with pytest.raises(InfeasibleError, match=r"'head\.weight' cannot have this layout"):
        planned(stack(2), "param:head.weight = P")


@pytest.mark.parametrize(
    ("inputs", "text", "only"), [("global", "S0", "R"), ("local", "R", "S0"), ("local", "S1", "S0")]
)
def test_an_input_is_called_as_the_user_calls_it(inputs: Literal["global", "local"], text: str, only: str) -> None:
    """Errors use the user's name `input`: the graph cannot have a node of that name, though torch layers take it."""
    words = rf"'input:in\* = {text}' cannot hold: 'input' cannot have this layout, only {only}: inputs="
    with pytest.raises(InfeasibleError, match=words):
        plan(nn.Linear(8, 8), {"input": torch.ones(8, 8)}, cluster(2), inputs=inputs, constraints=f"input:in* = {text}")


def test_a_loss_beside_what_is_returned_is_passed_over() -> None:
    problem = toy(on_meta(Beside), torch.empty(512, 8, device="meta"), on=cluster(2))
    made = planned(problem, "output:* = S0")
    returned = next(node for node in made.nodes if node.name == "output")
    assert [str(layout) for layout in returned.inputs[1:]] == ["S0", "S0"]
    with pytest.raises(InputError, match="no output that it names has 1 dims"):
        planned(problem, "output:0 = S0")
    with pytest.raises(InfeasibleError, match=r"output 1 of shape \(512, 8\) cannot have this layout"):
        planned(problem, "output:[12] = P")


def test_recompute_of_a_model_without_modules_is_refused_as_of_others() -> None:
    problem = toy(Random(0), torch.empty(64, 8, device="meta"), on=cluster(2))
    with pytest.raises(InputError, match=r"asks for recompute, but only blocks are recomputed of which .* no modules"):
        planned(problem, "recompute:* = full")
