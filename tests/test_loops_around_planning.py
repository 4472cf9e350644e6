"""What a loop has around planning changes no plan: modes of its own backward, and constraints of a saved plan."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from autopar import Cluster, Plan, plan
from autopar.planning.later_calls import request_beside
from autopar.planning.stages import request_of

EXAMPLES = {"input": torch.zeros(8, 16)}
CLUSTER = Cluster.preset("cpu", (2,))


def planned(constraints: tuple[str, ...] = ()) -> Plan:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return plan(model, EXAMPLES, CLUSTER, loss_fn=torch.mean, constraints=constraints)


def test_anomaly_mode_and_hooks_of_saved_tensors_see_nothing_of_it() -> None:
    """Gradients without data cannot be asked for a NaN, and hooks would count (or move) what a trace saves."""
    free = planned()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True), hooks:
        warnings.filterwarnings("error", message="Error detected")
        found = planned()
    assert found.predicted.flops == free.predicted.flops > 0
    assert (found.predicted, found.nodes) == (free.predicted, free.nodes)
    assert saved == []


def test_later_calls_of_a_saved_plan_have_its_constraints() -> None:
    made = Plan.from_json(planned(("ddp", "output:* = R")).to_json())
    assert request_beside(made, request_of(CLUSTER)).constraints == ("ddp", "output:* = R")
    assert request_beside(made, request_of(CLUSTER, constraints="fsdp")).constraints == ("fsdp",)
