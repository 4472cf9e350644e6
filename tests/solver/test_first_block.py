"""The first block after frozen layers is recomputed like the later ones, although its input needs no gradient."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from small_models import MODELS, inputs_of
from torch import nn

from autopar import Cluster, plan
from autopar.cost.structure.blocks import Repeat, find_repeats
from autopar.cost.structure.naming import stretch_name
from autopar.errors import InputError
from autopar.plans import Plan
from autopar.solver.constraints.idle_constraints import ConstraintWarning
from autopar.tracing import trace

BLOCKS = 4


class _Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.base(x.cos()) + self.up(self.down(x.cos()))).sin()


class _Beside(nn.Module):
    """Adds a low-rank adapter beside a given linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class _Model(nn.Module):
    """Four adapted blocks after an embedding; either the adapters alone or all parameters are trained."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(8, 16), nn.Sequential(*(_Adapted() for _ in range(BLOCKS)))
        if frozen:
            self.words.requires_grad_(False)
        else:
            self.requires_grad_(True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.words(ids))


IDS = torch.empty(64, 4, dtype=torch.long, device="meta")


def planned(model: nn.Module, *constraints: str, budget: int | None = None) -> Plan:
    cluster = Cluster.preset("cpu", (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstraintWarning)
        return plan(model, {"ids": IDS}, cluster, constraints=constraints, loss_fn=torch.sum, memory_budget=budget)


def recomputed(*constraints: str, budget: int | None = None) -> list[str]:
    return [segment.name for segment in planned(_Model(), *constraints, budget=budget).recompute]


def repeats(model: nn.Module) -> tuple[Repeat, ...]:
    return find_repeats(trace(model, {"ids": IDS}).graph)


def named(*blocks: int) -> list[str]:
    return [f"blocks.{i}" for i in blocks]


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        (["recompute:blocks.* = full"], named(0, 1, 2, 3)),
        (["recompute:* = full"], named(0, 1, 2, 3)),
        (["recompute:blocks.0 = full"], named(0)),
        (["recompute:blocks.[01] = full"], named(0, 1)),
        (["recompute:blocks.2 = full"], named(2)),
        (["recompute:blocks.[13] = full"], named(1, 3)),
        (["recompute:blocks.* = never"], []),
        (["ddp(recompute=full)"], named(0, 1, 2, 3)),
        (["fsdp(recompute=full)"], named(0, 1, 2, 3)),
        (["ddp(recompute=full)", "recompute:blocks.0 = never"], named(1, 2, 3)),
        (["ddp(recompute=full)", "recompute:blocks.[03] = never"], named(1, 2)),
    ],
)
def test_exactly_what_is_named_is_recomputed(constraints: list[str], expected: list[str]) -> None:
    assert recomputed(*constraints) == expected


def test_never_keeps_it_where_memory_is_short() -> None:
    budget = (
        planned(_Model(), "ddp").predicted.peak_bytes + planned(_Model(), "ddp(recompute=full)").predicted.peak_bytes
    ) // 2
    assert recomputed("ddp", budget=budget)
    assert not [name for name in recomputed("ddp", "recompute:blocks.0 = never", budget=budget) if "blocks.0" in name]


def test_parts_of_it_are_recomputed_like_those_of_others() -> None:
    parts = planned(_Model(), "ddp(recompute=selective)").recompute
    assert [part.name.split(".")[1] for part in parts] == [str(i) for i in range(BLOCKS)]
    assert all(part.inner for part in parts)


def test_it_frees_less_than_another_block_which_keeps_its_input_anyway() -> None:
    first, other, none = (
        planned(_Model(), "ddp", *asked).predicted.peak_bytes
        for asked in (["recompute:blocks.0 = full"], ["recompute:blocks.1 = full"], [])
    )
    value = IDS.numel() * 16 * 4 // 2
    assert first == other + value < none


def test_it_is_a_repeat_of_one() -> None:
    first, rest = repeats(_Model())
    assert (first.count, rest.count) == (1, BLOCKS - 1)
    assert (first.period, first.end) == (rest.period, rest.start)
    [all_alike] = repeats(_Model(frozen=False))
    assert all_alike.count == BLOCKS


def test_with_a_frozen_block_it_is_the_one_behind() -> None:
    model = _Model()
    model.blocks[0].requires_grad_(False)
    assert [repeat.count for repeat in repeats(model)] == [1, BLOCKS - 2]
    assert [segment.name for segment in planned(model, "recompute:blocks.* = full").recompute] == named(1, 2, 3)
    with pytest.raises(InputError, match=r"names nothing that can be recomputed: .* from 'blocks\.1' to 'blocks\.3'$"):
        planned(model, "recompute:blocks.0 = full")


def test_a_stretch_in_which_nothing_needs_a_gradient_is_none() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(BLOCKS)))
    layers[0].requires_grad_(False)
    found = find_repeats(trace(layers, {"input": torch.empty(8, 16, device="meta")}).graph)
    assert [repeat.count for repeat in found] == [BLOCKS - 1]


@pytest.mark.parametrize(
    ("name", "products", "blocks"),
    [
        ("bert-4", ("query", "value"), "bert.encoder.layer"),  # here blocks may be split where sizes are taken
        ("olmo-5", ("q_proj", "v_proj"), "model.layers"),  # two products within the first block also look alike
        ("llama-4", ("q_proj",), "model.layers"),
    ],
)
def test_blocks_of_published_models_with_adapters(name: str, products: tuple[str, ...], blocks: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]().requires_grad_(False)
        for path, module in list(model.named_modules()):
            if path.rpartition(".")[2] in products:
                model.set_submodule(path, _Beside(module))
    graph = trace(model, inputs_of(model)).graph
    nodes, found = list(graph.nodes), find_repeats(graph)
    spans = [repeat.instance(i) for repeat in found for i in range(repeat.count)]
    names = [stretch_name(nodes[span.start : span.stop]) for span in spans]
    assert names == [f"{blocks}.{i}" for i in range(int(name[-1]))]
    assert [repeat.count for repeat in found] == [1, int(name[-1]) - 1]


def test_where_all_is_trained_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(), ("ddp(recompute=full)",), ("recompute:blocks.0 = full",)]
    found = [replace(planned(_Model(frozen=False), *some), planning_seconds={}) for some in texts]
    monkeypatch.setattr("autopar.cost.structure.blocks._before", lambda *_: [])
    assert found == [replace(planned(_Model(frozen=False), *some), planning_seconds={}) for some in texts]
