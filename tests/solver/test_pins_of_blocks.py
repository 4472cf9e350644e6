"""A pin on one of several equal blocks excludes plans, and changes nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_graphs import Fixed, every_count, recomputable
from test_rows import drawn_choices
from toys import Stack, Toy, cluster, on_meta, planned, stack, toy

from autopar.cluster import Cluster
from autopar.cost.structure.blocks import repeats_under, unparted
from autopar.errors import InfeasibleError
from autopar.planning.simulation import predicted_on, simulated
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.solution import read_solution
from autopar.stopwatch import Stopwatch

MESH = Cluster.preset("cpu", (2,))  # here one bucket more costs 7 % of a step


@pytest.mark.parametrize("budget", [None, 1.02])
def test_a_pin_that_the_best_plan_meets_leaves_it(budget: float | None) -> None:
    problem, least = replace(stack(2), cluster=MESH), None
    if budget is not None:
        with pytest.raises(InfeasibleError) as refused:
            planned(problem, budget=1)
        assert refused.value.smallest_budget_bytes is not None
        least = round(refused.value.smallest_budget_bytes * budget)
    free = planned(problem, budget=least)
    storage = next(str(p.storage) for p in free.parameters if p.name == "blocks.1.up.weight")
    kept = [i for i in range(3) if not any(s.name.startswith(f"blocks.{i}") for s in free.recompute)]
    never = [f"recompute:blocks.{kept[-1]} = never"] if kept else []
    for text in [f"param:blocks.1.up.weight = {storage}", "param:blocks.1.up.weight != S1", *never]:
        made = planned(problem, text, budget=least)
        assert made.certificate == free.certificate, text
        assert (made.nodes, made.parameters, made.buckets) == (free.nodes, free.parameters, free.buckets), text


def test_a_pin_on_one_block_costs_no_more_than_on_all() -> None:
    """The blocks share buckets as they do without the pin."""
    problem = toy(on_meta(Stack, 3, 64, 256), torch.empty(1024, 64, device="meta"), on=MESH)
    one, every = (planned(problem, f"param:blocks.{some}.norm.weight = S0") for some in "1*")
    stored = {p.name: str(p.storage) for p in planned(problem).parameters}
    assert stored["blocks.1.norm.weight"] == "R", "the best plan does not meet it"
    assert one.certificate.objective <= every.certificate.objective * (1 + 1e-3)
    assert one.certificate.bound <= every.certificate.objective
    assert any({name.split(".")[1] for name in bucket.names} >= {"0", "1", "2"} for bucket in one.buckets)


def test_the_prediction_of_a_saved_plan_is_its_own() -> None:
    model, inputs = on_meta(Stack, 3, 64, 256), {"x": torch.empty(1024, 64, device="meta")}
    request = request_of(MESH, constraints=["param:blocks.1.up.weight = S0", "param:blocks.0.down.weight = S1"])
    watch = Stopwatch()
    ready = prepare(model, trace_for(model, inputs, None, request, watch), request, watch)
    made = ready.solve()
    again = predicted_on(ready, made, MESH)
    assert (again.step_seconds, again.peak_bytes) == (made.predicted.step_seconds, made.predicted.peak_bytes)
    assert simulated(ready, made).step_seconds == pytest.approx(made.predicted.step_seconds, rel=0.1)


def _parted(asked: Toy, begins: int) -> Toy:
    """The same problem, with the blocks from number `begins` on told apart from those before."""
    [repeat] = asked.repeats
    nodes = list(asked.graph.nodes)
    marks = {nodes[repeat.instance(i).start]: "marked" for i in range(begins, repeat.count)}
    parts = repeats_under(asked.graph, marks, asked.repeats)
    assert [part.count for part in parts] == [begins, repeat.count - begins]
    assert unparted(parts) == asked.repeats
    return replace(asked, memory=replace(asked.memory, repeats=parts), repeats=parts)


def test_rows_of_blocks_in_the_midst_of_a_bucket() -> None:
    """Without recompute no bucket is reduced at the end of these blocks' backward."""
    asked = _parted(toy(on_meta(Stack, 9), torch.empty(64, 16, device="meta"), on=cluster(2, 2, seed=3)), 5)
    problem = asked.problem()
    fixed, none = Fixed(problem), [every_count(problem.stages[i])[0] for i in recomputable(problem)]
    assert not np.any(none)
    for seed in (602, 604):
        outcome = fixed.least(drawn_choices(problem, seed), none)
        peak = asked.predict(read_solution(fixed.model, outcome)).peak_bytes
        assert peak * (1 - 1e-6) <= outcome.objective * UNIT <= peak * 1.02
