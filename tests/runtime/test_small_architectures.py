"""Many small architectures on four simulated ranks: loss and gradients of one process, under three kinds of plans."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
from architecture_plans import EXACT, EXCHANGED, MIXTURES, kinds_of, plan_of, promote
from deviation import deviation
from promotion import Promotion
from small_architectures import MODELS

from autopar.strategies import constant
from autopar.tracing import trace

FEW = ("llama", "gpt_neox_japanese", "mixtral", "t5", "convnext", "nn_transformer")


def check(name: str, kinds: tuple[str, ...] = ()) -> None:
    with Promotion(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries, and of ops without a rule, which other tests check
        for kind in kinds or kinds_of(name):
            model, inputs = MODELS[name]()
            traced = trace(model, inputs)
            promote(traced.graph)
            plan = plan_of(kind, name, model, traced)
            assert deviation(model, inputs, traced, plan) < EXACT, kind
            if kind in EXCHANGED:
                axes = 2 if kind == "exchanged over both" else 1
                assert any(node.factors.count("t+e") >= axes for node in plan.nodes)


@pytest.mark.parametrize("name", FEW)
def test_some_architectures_under_a_random_plan(name: str) -> None:
    check(name, ("random",))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_constants_as_large_as_to_be_split(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant, "LARGE", -1)
    check(name, ("random",))


@pytest.mark.parametrize("kind", EXCHANGED)
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_whose_tokens_go_to_their_experts(name: str, kind: str) -> None:
    check(name, (kind,))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_architecture(name: str) -> None:
    torch.set_num_threads(1)
    check(name)
