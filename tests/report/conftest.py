"""A hand-made plan, as the solver might make it for a small GPT on a 2x2 mesh."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.layout import Layout
from autopar.plans import (
    Bucket,
    Certificate,
    Collective,
    Moment,
    NodePlan,
    ParameterPlan,
    Plan,
    PlanSize,
    Prediction,
    Segment,
)

BLOCKS = 4


def _node(
    position: int, target: str, scope: str, shape: tuple[int, ...], layout: str, factors: tuple[str, ...]
) -> NodePlan:
    whole = Layout.parse("S0,R")
    return NodePlan(position, f"n{position}", target, scope, (whole,), (Layout.parse(layout),), (shape,), factors)


def _nodes() -> tuple[NodePlan, ...]:
    rows = [("torch.nn.functional.embedding", "transformer.wte", (8, 256, 64), "S0,R", ("b", ""))]
    for i in range(BLOCKS):
        block = f"transformer.h.{i}"
        rows += [
            ("torch.nn.functional.layer_norm", f"{block}.ln_1", (8, 256, 64), "S0,R", ("b", "")),
            ("torch.nn.functional.linear", f"{block}.mlp.c_fc", (8, 256, 256), "S0,S2", ("b", "o")),
            ("torch.nn.functional.gelu", f"{block}.mlp.act", (8, 256, 256), "S0,S2", ("b", "f")),
            ("Tensor.view", f"{block}.mlp", (8, 256, 256), "S0,S2", ("b", "f")),
            ("torch.nn.functional.linear", f"{block}.mlp.c_proj", (8, 256, 64), "S0,P", ("b", "i")),
            ("_operator.add", block, (8, 256, 64), "S0,R", ("b", "")),
        ]
    rows.append(("torch.nn.functional.cross_entropy", "", (), "P,R", ("b", "")))
    return tuple(_node(i, *row) for i, row in enumerate(rows))


def _parameters() -> tuple[ParameterPlan, ...]:
    made = [ParameterPlan("transformer.wte.weight", (256, 64), "torch.float32", Layout.parse("R,R"), True)]
    for i in range(BLOCKS):
        name = f"transformer.h.{i}.mlp.c_fc.weight"
        made.append(ParameterPlan(name, (256, 64), "torch.float32", Layout.parse("S1,S0"), True, regather=True))
    return tuple(made)


@pytest.fixture
def plan() -> Plan:
    moments = (
        Moment("end of forward", {"parameters": 3 * 2**20, "activations": 40 * 2**20}),
        Moment("optimizer step", {"parameters": 3 * 2**20, "optimizer state": 6 * 2**20}),
    )
    return Plan(
        mesh_shape=(2, 2),
        axis_names=("dp", "tp"),
        cluster=Cluster.preset("cpu", (2, 2), ("dp", "tp")).to_dict(),
        fingerprints={"graph": "0" * 32, "model": "1" * 32, "mesh": "2x2"},
        precision={"parameter": "float32", "compute": None},
        micro_batches=1,
        optimizer="adamw",
        inputs="global",
        memory_budget_bytes=64 * 2**20,
        constraints=(),
        nodes=_nodes(),
        parameters=_parameters(),
        recompute=tuple(Segment(1 + 6 * i, 6 + 6 * i, f"transformer.h.{i}") for i in (0, 1, 3)),
        collectives=(
            Collective("all_reduce", 1, 2**20, 4, 0.012, "forward", "activations"),
            *(
                Collective("all_gather", 0, 2**12, 2, 0.001, phase, f"bucket {i}")
                for i in range(BLOCKS)
                for phase in ("forward", "backward")
            ),
        ),
        predicted=Prediction(
            step_seconds=0.25,
            compute_seconds=0.2,
            comm_seconds=0.02,
            recompute_seconds=0.02,
            optimizer_seconds=0.01,
            peak_bytes=43 * 2**20,
            parts=moments[0].parts,
            moments=moments,
            flops=10**10,
        ),
        certificate=Certificate("optimal", 0.25, 0.25, 0.0, "HiGHS"),
        size=PlanSize(2096, 41, 305, 5500),
        planning_seconds={"trace": 0.3, "solve": 0.5},
        buckets=tuple(Bucket((f"transformer.h.{i}.mlp.c_fc.weight",), (Layout.parse("R+,S0"),)) for i in range(BLOCKS)),
        notes=("torch.foo has no rule: replicated [at model.py:3]",),
    )
