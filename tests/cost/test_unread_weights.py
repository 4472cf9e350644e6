"""Parameters and buffers that the planned call does not read also take memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.memory.weights import buffers_of, parameters_of, unread_bytes
from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.precision import Precision
from autopar.tracing import trace

SPARE = 4 * (256 * 256 + 256) + 4 * 100


class Spare(nn.Module):
    """Layers and a buffer that the call reads, and the same number that it does not, including tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.read.weight
        self.spare, self.again = nn.Linear(256, 256), nn.Linear(256, 256)
        self.again.weight, self.again.bias = self.spare.weight, self.spare.bias
        self.register_buffer("shift", torch.empty(64))
        self.register_buffer("table", torch.empty(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(x) + self.shift.to(x.dtype)).sum()


def spare() -> Spare:
    with torch.device("meta"):
        return Spare()


def planned(budget: int | None = None, **options: object) -> autopar.Plan:
    inputs, mesh = {"x": torch.empty(32, 64, device="meta")}, autopar.Cluster.preset("cpu", (4,))
    return autopar.plan(spare(), inputs, mesh, memory_budget=budget, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["ddp", "fsdp"])
def test_they_are_there_whole_at_every_moment(preset: str) -> None:
    moments = planned(constraints=preset).predicted.moments
    assert moments and all(moment.parts["unread weights"] == SPARE for moment in moments)


def test_floating_parameters_count_in_the_dtype_that_they_are_stored_in() -> None:
    assert planned(precision="pure-bf16").predicted.parts["unread weights"] == (SPARE - 400) // 2 + 400


def test_budgets_that_they_pass_are_refused_and_the_smallest_has_them() -> None:
    peak = planned().predicted.peak_bytes
    assert peak > SPARE
    with pytest.raises(InfeasibleError, match="unread weights") as refused:
        planned(SPARE)
    smallest = refused.value.smallest_budget_bytes
    assert smallest is not None and SPARE < smallest <= peak * 1.001
    assert planned(smallest).predicted.peak_bytes <= smallest


def test_those_that_are_stored_in_parts_already_count_as_parts() -> None:
    """This is the case for weights that another graph of a running model has sharded."""
    model = spare()
    graph = trace(model, {"x": torch.empty(32, 64)}).graph
    pinned = {f"{name}.weight": Layout.parse("S0") for name in ("spare", "again")}
    found = unread_bytes(graph, parameters_of(model), buffers_of(model), None, pinned, (4,))
    assert found == SPARE - 4 * 256 * 256 * 3 // 4


def test_the_report_tells_of_them() -> None:
    assert "unread weights" in planned().explain()


def test_states_of_what_other_graphs_train_count_once_under_all_names() -> None:
    """Two AdamW states for each element, whole or sharded like its parameter; without what this graph trains. And a
    number of steps for every parameter."""
    model = spare()
    graph = trace(model, {"x": torch.empty(32, 64)}).graph
    pinned = {f"{name}.weight": Layout.parse("S0") for name in ("spare", "again")}
    parameters, given = parameters_of(model), (Precision(), "adamw", 1)
    cluster = autopar.Cluster.preset("cpu", (4,))
    others = {"read.weight", "head.weight", "spare.weight", "again.weight", "spare.bias", "again.bias"}
    memory = memory_on(cluster, graph, parameters, *given, pinned=pinned, trained=others)
    assert memory.fixed["optimizer state"] == 2 * 4 * (256 * 256 // 4 + 256) + 4 * 4
    memory = memory_on(cluster, graph, parameters, *given, train=False, trained=others)
    assert memory.fixed["optimizer state"] == 2 * 4 * (256 * 256 + 256 + 64 * 64) + 4 * 3
