"""What must hold of plans of small published models: folding costs little, budgets only help, axes have no order.

Most cases are slow: `pytest tests/solver/test_small_models.py -m ""`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from small_models import MODELS, ready

from autopar import InfeasibleError, Plan
from autopar.cost.blocks import find_repeats
from autopar.planning import Prepared

GAP = 1e-3  # of every plan here
NEAR = 1e-2  # at which an unfolded problem is solved first
COST = 1.02  # of a step, that folding may take
LADDER = 12


@functools.cache
def problem(name: str, *mesh: int) -> Prepared:
    return ready(name, *mesh)


def smallest(asked: Prepared) -> int:
    """The smallest budget that has a plan."""
    with pytest.raises(InfeasibleError) as refused:
        asked.solve(memory_budget_bytes=1)
    assert refused.value.smallest_budget_bytes is not None
    return refused.value.smallest_budget_bytes


def budgets(asked: Prepared, *parts: float) -> list[int]:
    """As parts of the way from the smallest budget to what the fastest plan takes."""
    least, most = smallest(asked), asked.solve(memory_budget_bytes=1 << 60).predicted.peak_bytes
    return [int(least + part * (most - least)) + 1 for part in parts]


def solved(asked: Prepared, budget: int, *, fold: bool = True, gap: float = GAP) -> Plan:
    made = asked.solve(memory_budget_bytes=budget, fold=fold, gap=gap)
    assert made.certificate.status == "optimal"
    assert made.predicted.peak_bytes <= budget
    assert made.certificate.objective == pytest.approx(made.predicted.step_seconds, rel=1e-9)
    return made


def is_alike(asked: Prepared, made: Plan) -> bool:
    """Whether all blocks of a kind have the same layouts and storage, whichever of them recompute."""
    nodes = {node.position: (node.inputs, node.outputs, node.local) for node in made.nodes}
    stored = {p.name: (p.storage, p.regather) for p in made.parameters}
    graph = list(asked.traced.graph.nodes)
    for repeat in find_repeats(asked.traced.graph):
        blocks = [
            [(nodes.get(i), stored.get(str(graph[i].target))) for i in repeat.instance(block)]
            for block in range(repeat.count)
        ]
        if any(block != blocks[0] for block in blocks):
            return False
    return True


def first(names: list[str], quick: int) -> list[object]:
    return [pytest.param(name, marks=[] if i < quick else pytest.mark.slow) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", first(list(MODELS), 1))
def test_folding_costs_little(name: str) -> None:
    """At most 2 % of a step, and nothing where the unfolded plan has all blocks alike.

    The unfolded optimum is proven no further than it takes: often its bound says enough long before. Its blocks are
    recomputed as a whole or not at all; those of folded ones in parts too, so that they may be faster.
    """
    asked = problem(name, 4)
    assert any(repeat.count > 1 for repeat in find_repeats(asked.traced.graph))
    for budget in (1 << 60, *budgets(asked, 0.3)):
        folded = solved(asked, budget)
        unfolded = solved(asked, budget, fold=False, gap=NEAR)
        if folded.predicted.step_seconds > COST * unfolded.certificate.bound:
            unfolded = solved(asked, budget, fold=False)
        assert unfolded.size.decisions > folded.size.decisions, "nothing was folded"
        ratio = folded.predicted.step_seconds / unfolded.predicted.step_seconds
        print(f"{name}: {ratio:.5f}, gap unfolded {unfolded.certificate.gap:.5f}, alike {is_alike(asked, unfolded)}")
        assert ratio <= COST
        assert ratio <= 1 + GAP or not is_alike(asked, unfolded)


@pytest.mark.parametrize("name", first(["llama-4", "gpt2-6", "bert-4", "vit-4", "t5-4"], 0))
def test_more_budget_costs_no_time(name: str) -> None:
    """Twelve budgets from the smallest to more than the fastest plan needs."""
    asked = problem(name, 4)
    ladder = budgets(asked, *(i / (LADDER - 2) for i in range(LADDER)))
    seconds = [solved(asked, budget).predicted.step_seconds for budget in ladder]
    print(name, [f"{s / seconds[-1]:.4f}" for s in seconds])
    for less, more in itertools.pairwise(seconds):
        assert more <= less * (1 + GAP)


@pytest.mark.parametrize("part", [None, 0.3])
@pytest.mark.parametrize("name", first(["gpt2-4", "llama-6-grouped", "bert-4", "vit-4", "t5-4"], 0))
def test_the_order_of_axes_is_no_matter(name: str, part: float | None) -> None:
    """2x4 and 4x2 of the same two axes: links, and not their numbers, decide. `part`: of the way to a loose budget."""
    asked = problem(name, 2, 4)
    cluster = asked.request.cluster
    turned = asked.on(replace(cluster, axes=cluster.axes[::-1]))
    [budget] = [1 << 60] if part is None else budgets(asked, part)
    one, other = solved(asked, budget), solved(turned, budget)
    assert one.predicted.step_seconds == pytest.approx(other.predicted.step_seconds, rel=GAP)
