"""Branching on the choices that a relaxation mixes: they are compared by cost, and equivalent ones stay together."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from random_graphs import drawn, every_plan
from test_relaxation import program
from transformers import MixtralConfig, MixtralForCausalLM

from autopar import Cluster, plan
from autopar.plans import GAP
from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.program import Program
from autopar.solver.search import branching, incumbent, search
from autopar.solver.search.choices import Choices

KINDS = ["large", "small", "begun"]


def knapsack() -> Program:
    """Two ops with four choices each under a memory budget: two expensive and small, two cheap and large."""
    found = Program()
    ops = [[found.variable(f"x.{op}.{i}", integer=True) for i in range(4)] for op in range(2)]
    for ones in ops:
        found.equal("one", [(x, 1.0) for x in ones], 1.0)
    sizes = {x: size for ones in ops for x, size in zip(ones, (5.0, 1.0, 5.0, 1.0), strict=True)}
    found.at_most("budget", list(sizes.items()), 8.0)
    found.cost = np.array([1.0, 9.0, 1.0, 9.0, 1.0, 4.0, 1.0, 4.0])
    return found


def test_equivalent_choices_stay_together() -> None:
    asked = knapsack()
    root = asked.relax("highs", 60.0, {})
    assert root.objective == pytest.approx(3.5)  # half of the second op is small: saves 2 of size for a cost of 1.5
    parts = Choices(asked.matrix()).split(root)
    assert parts is not None
    assert {frozenset(part) for part in parts} == {frozenset({4, 6}), frozenset({5, 7})}, "the second op, by size"
    assert all(set(part.values()) == {(0.0, 0.0)} for part in parts)
    seconds = {min(part): asked.relax_again(root, 60.0, part).objective for part in parts}
    assert seconds == {4: pytest.approx(5.0), 5: pytest.approx(6.0)}


def hidden() -> Program:
    """Two ops. The first either moves its weight, which takes 10 seconds of which compute hides at most 3, or takes 6
    seconds more. The relaxation mixes the second for its size, which is worth little, and one of its choices is bad."""
    found = Program()
    first, second = ([found.variable(f"x.{op}.{i}", integer=True) for i in range(2 + op)] for op in range(2))
    weight = found.variable("x.weight", lower=1.0)
    for ones in (first, second):
        found.equal("one", [(x, 1.0) for x in ones], 1.0)
    flows = found.transport([[weight]], [[x] for x in first], np.ones((1, 2), dtype=bool))[0]
    saved = found.variable("hidden", upper=3.0, whole=False)
    found.at_most("hidden", [(saved, 1.0), (int(flows[0]), -10.0)], 0.0)
    found.at_most("size", [(second[0], 2.0), (second[1], 1.0), (second[2], 1.0)], 1.5)
    found.cost = np.zeros(len(found.names))
    found.cost[[flows[0], first[1], *second, saved]] = 10.0, 6.0, 1.0, 1.1, 3.0, -1.0
    return found


@pytest.mark.parametrize("with_flows", [False, True])
def test_what_flows_are_worth_tells_choices_apart(with_flows: bool) -> None:
    asked = hidden()
    root = asked.relax("highs", 60.0, {})
    assert root.objective == pytest.approx(0.7 * 6 + 1.05)  # three tenths of the weight move, all hidden
    parts = Choices(asked.matrix(), with_flows=with_flows).split(root)
    assert parts is not None
    assert {min(part) for part in parts} == ({0, 1} if with_flows else {2, 3})
    if with_flows:
        seconds = sorted(asked.relax_again(root, 60.0, part).objective for part in parts)
        assert seconds == pytest.approx([6 + 1.05, 7 + 1.05])


def test_a_far_box_is_proven_where_a_solution_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MIP is solved even if the node's relaxation stopped at the time limit, so that it cannot be branched on."""
    monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", 0)
    asked = hidden()
    root = replace(asked.relax("highs", 60.0, {}), status="stopped")
    far = Outcome("feasible", np.zeros(len(asked.names)), 9.0, 0.0)
    some = incumbent.Incumbent(asked, "highs", 1e-3, Clock(60.0, 60.0), far)
    assert some.is_mixed(root) and some.solve(root)
    assert some.best is not None and some.best.objective == pytest.approx(7.1)
    assert 7.1 * (1 - 2e-3) <= some.proven <= 7.1


def test_experts_that_gather_in_part_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers of experts take longer than compute hides: branching on choices finds the same optimum as HiGHS alone."""
    sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4, vocab_size=512)
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=16, num_experts_per_tok=2, use_cache=False)
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    tokens = torch.empty(128, 64, dtype=torch.long, device="meta")
    cuts, split, found = [], Choices.split, []
    monkeypatch.setattr(Choices, "split", lambda *some: cuts.append(parts := split(*some)) or parts)
    for few in (0, 1_000_000):
        monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", few)
        cuts.clear()
        made = plan(model, {"input_ids": tokens, "labels": tokens}, Cluster.preset("h100", (2, 2)), precision="bf16")
        assert made.certificate.status == "optimal"
        assert any(cuts) == (few == 0)
        found.append(made.certificate)
    for one, other in itertools.permutations(found):
        assert one.objective * (1 - GAP) <= other.objective
        assert other.bound <= one.objective


def test_nothing_is_mixed_in_whole_numbers() -> None:
    asked = knapsack()
    assert Choices(asked.matrix()).split(asked.integrate("highs", np.arange(8), 60.0, 0.0, {})) is None


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_the_parts_are_the_box(mesh: tuple[int, ...]) -> None:
    """The two child boxes together have every choice of the parent, share none, and both exclude the relaxation."""
    asked = program(0.3, *mesh)
    [(count, whether)] = asked.records.counts
    root = asked.relax("highs", 60.0, {})
    node = asked.relax_again(root, 60.0, {count: (2.0, 2.0), whether: (1.0, 1.0)})
    choices, seen = Choices(asked.matrix()), 0
    while (parts := choices.split(node)) is not None:
        seen += 1
        new = [part.keys() - node.counts.keys() for part in parts]
        assert new[0] and new[1] and not new[0] & new[1]
        group = next(ones for ones in _groups(asked) if new[0] & ones)
        assert new[0] | new[1] == group - node.counts.keys()
        for part, gone in zip(parts, new, strict=True):
            assert 0 < sum(node.values[list(gone)]) < 1
            assert {**node.counts, **dict.fromkeys(gone, (0.0, 0.0))} == part
        node = asked.relax_again(node, 60.0, parts[0])
        if node.status != "optimal":
            break
    assert seen


def _groups(asked: Program) -> list[set[int]]:
    found: dict[str, set[int]] = {}
    for variable, name in enumerate(asked.names):
        if name.startswith("x."):
            found.setdefault(name.rsplit(".", 1)[0], set()).add(variable)
    return list(found.values())


@pytest.mark.parametrize("first", [pytest.param(s, marks=pytest.mark.slow if s else []) for s in range(0, 100, 10)])
@pytest.mark.parametrize(("few", "most"), [(0, 1_000_000), (20_000, 1_000_000), (20_000, 0)], ids=KINDS)
def test_cut_by_choices_the_optimum_is_that_of_exhaustive_search(
    few: int, most: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten graphs in which every node is branched on choices until its relaxation is integral or HiGHS solves it."""
    cuts, split, begun, solve = [], Choices.split, [], incumbent.Incumbent.partial_solve
    names = "MAX_SMALL_PROGRAM", "_MAX_PART_SHARE", "_ROUND_EVERY"
    for module, name, value in zip((incumbent, search, branching), names, (few, 0.0, 1), strict=True):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(branching, "_MAX_CUTS", most)
    monkeypatch.setattr(incumbent, "_FIRST_NODES", 0)
    monkeypatch.setattr(incumbent, "_MAX_VARIABLES_AT_ONCE", 0)
    monkeypatch.setattr(incumbent.Incumbent, "partial_solve", lambda *some: begun.append(one := solve(*some)) or one)
    monkeypatch.setattr(incumbent.Incumbent, "has_many", lambda _, node: node.status == "optimal")
    monkeypatch.setattr(Choices, "split", lambda *some: cuts.append(found := split(*some)) or found)
    for seed in range(first, first + 10):
        asked = drawn(seed, 200)
        plans = list(every_plan(asked, asked.problem(fold=False), recompute=False))
        peaks = sorted(plan.predicted.peak_bytes for plan in plans)
        for part in (0.0, 0.2, 0.6):
            budget = peaks[int(part * (len(peaks) - 1))] * (1 + 1e-9)
            best = min(plan.predicted.step_seconds for plan in plans if plan.predicted.peak_bytes <= budget)
            found = asked.solve(budget, fold=False, recompute=False)
            assert found.seconds == pytest.approx(best, rel=1e-6), f"seed {seed}"
    assert any(cuts if most else begun)
