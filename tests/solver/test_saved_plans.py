"""A plan that is saved and loaded again equals the original in all its fields."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import MODELS, inputs_of
from thinned import thinned
from torch import nn

import autopar
from autopar.plans import Plan


def _given(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = MODELS[name]()
    return model, inputs_of(model)


def _same(made: Plan, path: Path) -> None:
    made.save(path)
    again = Plan.load(path)
    assert [f.name for f in fields(Plan) if getattr(again, f.name) != getattr(made, f.name)] == []
    assert again == made
    assert again.to_json() == made.to_json()


OPTIONS: list[dict[str, Any]] = [
    {"cluster": autopar.Cluster.preset("h100", (8,))},
    {"constraints": "fsdp+tp(zero=2, sequence=split, recompute=full)"},
    {"constraints": ["axis:0 = fsdp", "param:* ~ S0", "recompute:* = selective"], "precision": torch.bfloat16},
    {"micro_batches": [1, 2], "compiled": True, "optimizer": "adafactor"},
    {"inputs": "local", "constraints": "output:* = R", "optimizer": "sgd"},
    {"micro_batches": 4, "memory_budget": "2GiB", "precision": autopar.Precision(compute=torch.float16)},
]


@pytest.mark.parametrize(
    ("name", "options"),
    thinned(3, ["gpt2-4", "llama-4", "vit-4"], OPTIONS),
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_loaded_plan_is_the_one_that_was_saved(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    cluster = options.get("cluster", autopar.Cluster.preset("a100", [2, 4], axis_names=("dp", "tp")))
    others = {key: value for key, value in options.items() if key != "cluster"}
    _same(autopar.plan(*_given(name), cluster, **others), tmp_path / "plan.json")


def test_so_is_one_with_everything_that_compare_adds(tmp_path: Path) -> None:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)]
    model, inputs = nn.Sequential(*blocks, nn.Linear(32, 4)), {"input": torch.empty(64, 32)}
    asked = {"tradeoff": 2, "against": ["fsdp", "tp(recompute=full)", "hsdp", "param:* = R"]}
    made = autopar.compare(model, inputs, autopar.Cluster.preset("cpu", (2,)), loss_fn=torch.sum, **asked)
    assert made.tradeoff and made.streams
    assert {one.fits for one in made.comparison} == {True, False}  # a mesh with one axis cannot have the preset hsdp
    _same(made, tmp_path / "plan.json")


def test_so_are_those_of_a_search_and_of_a_profile(tmp_path: Path) -> None:
    results = autopar.search(*_given("gpt2-4"), "v100", 4, micro_batches=(1, 2))
    for result in results:
        assert result.plan is not None
        _same(result.plan, tmp_path / "plan.json")
    profile = tmp_path / "cluster.json"
    autopar.Cluster.preset("cpu", (4,)).save(profile)
    _same(autopar.plan(*_given("vit-4"), autopar.Cluster.load(profile)), tmp_path / "plan.json")
