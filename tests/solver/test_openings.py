"""Branching on buckets that a relaxation opens fractionally: each exists or not in a child, and no plan is lost."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from autopar import Cluster, plan
from autopar.plans import GAP
from autopar.solver.linear.program import Program
from autopar.solver.linear.records import Opened
from autopar.solver.search import branching, incumbent, search
from autopar.solver.search.openings import Openings

AXES, PARAMETERS = 3, 5


def moving(seed: int) -> tuple[Program, float]:
    """Parameters each communicate over one of the axes. Each axis hides its communication up to a limit and, if used at
    all, has one bucket, of whose latency each of its parameters pays a share. Also returns the optimal cost."""
    draw = random.Random(seed)
    seconds = [draw.uniform(1, 4) for _ in range(PARAMETERS)]
    hidden, latency = draw.uniform(1, 5), draw.uniform(0.2, 3)
    rates, part = [1 + 0.2 * draw.random() for _ in range(AXES)], 1 / PARAMETERS
    found, cost = Program(), dict[int, float]()
    weights = [found.variable("weight", lower=1.0) for _ in seconds]
    x = [[found.variable(f"x.{p}.{a}", integer=True) for a in range(AXES)] for p in range(PARAMETERS)]
    flows = []
    for weight, ones in zip(weights, x, strict=True):
        found.equal("one", [(v, 1.0) for v in ones], 1.0)
        flows.append(found.transport([[weight]], [[v] for v in ones], np.ones((1, AXES), dtype=bool))[0].tolist())
    for axis, rate in enumerate(rates):
        its = [some[axis] for some in flows]
        cost |= {f: rate * s + latency * part for f, s in zip(its, seconds, strict=True)}
        saved = found.variable("hidden", upper=hidden, whole=False)
        found.at_most("hidden", [(saved, 1.0), *((f, -rate * s) for f, s in zip(its, seconds, strict=True))], 0.0)
        missing, opened = found.variable("missing", whole=False), found.variable("opened", integer=True)
        found.at_least("missing", [(missing, 1.0), (opened, -1.0), *((f, part) for f in its)], 0.0)
        for f in its:
            found.at_least("opened", [(opened, 1.0), (f, -1.0)], 0.0)
        found.records.opened.append(Opened(opened, missing, 1.0))
        cost |= {saved: -1.0, missing: latency}
    found.cost = np.array([cost.get(v, 0.0) for v in range(len(found.names))])
    best = min(
        sum(
            max(0.0, moved - hidden) + latency * (axis in made)
            for axis, moved in enumerate(_moved(made, seconds, rates))
        )
        for made in itertools.product(range(AXES), repeat=PARAMETERS)
    )
    return found, best


def _moved(made: tuple[int, ...], seconds: list[float], rates: list[float]) -> list[float]:
    return [rate * sum(s for a, s in zip(made, seconds, strict=True) if a == axis) for axis, rate in enumerate(rates)]


def test_cut_by_buckets_the_optimum_is_that_of_exhaustive_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimum is the same without this branching, which then needs more nodes; also in a search of part of it."""
    parts, relax, split = [0], Program.relax_again, Openings.split
    monkeypatch.setattr(Program, "relax_again", lambda *a, **k: parts.append(parts.pop() + 1) or relax(*a, **k))
    monkeypatch.setattr(incumbent, "MAX_SMALL_PROGRAM", 0)
    monkeypatch.setattr(search, "_MAX_COLUMNS_WHOLE", 0)
    monkeypatch.setattr(branching, "_ROUND_EVERY", 1)
    monkeypatch.setattr(incumbent.Incumbent, "has_many", lambda _, node: node.status == "optimal")
    found: dict[bool, int] = {}
    for by_buckets, whole in ((True, 0.0), (True, 1.0), (False, 1.0)):
        monkeypatch.setattr(search, "_MAX_PART_SHARE", whole)
        monkeypatch.setattr(Openings, "split", split if by_buckets else lambda *_: None)
        parts[:] = [0]
        for seed in (0, 1, 4):
            asked, best = moving(seed)
            made = search.search(asked, gap=GAP)
            assert made.status == "optimal"
            assert made.bound <= best * (1 + 1e-9), f"seed {seed}"
            assert best * (1 - 1e-9) <= made.objective <= best / (1 - 1.01 * GAP), f"seed {seed}"
        found[by_buckets] = parts[0]
    assert 0 < 2 * found[True] < found[False]


def test_a_bucket_is_there_or_not() -> None:
    asked, _ = moving(1)
    root = asked.relax("highs", 60.0, {})
    parts = Openings(asked).split(root)
    assert parts is not None
    [variable] = {v for part in parts for v in part}
    assert variable in [one.variable for one in asked.records.opened]
    assert {part[variable] for part in parts} == {(0.0, 0.0), (1.0, 1.0)}
    children = [asked.relax_again(root, 60.0, part) for part in parts]
    assert min(child.objective for child in children) > root.objective + 1e-6
    assert Openings(asked).split(asked.integrate("highs", np.arange(len(asked.names)), 60.0, 0.0, {})) is None


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 4), (2, 2, 2)])
def test_a_model_that_uses_several_axes_in_part_is_proven(
    mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BERT whose weights' communication takes about as long as its compute: without this branching a gap remains."""
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(vocab_size=512))
    ids = torch.empty(32, 256, dtype=torch.long, device="meta")
    found, cuts, split = [], [], Openings.split
    for each in (lambda *some: cuts.append(parts := split(*some)) or parts, lambda *_: None):
        monkeypatch.setattr(Openings, "split", each)
        on = Cluster.preset("h100", mesh)
        found.append(plan(model, {"input_ids": ids, "labels": ids}, on, precision="bf16", time_limit=15).certificate)
    assert any(cuts)
    assert found[0].status == "optimal"
    assert found[0].objective <= found[1].objective * (1 + GAP)
    if found[1].status == "optimal":
        assert found[1].objective <= found[0].objective * (1 + GAP)
