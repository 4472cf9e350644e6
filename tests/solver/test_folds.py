"""Analysing equal blocks once gives the same figures as analysing every block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import transformers
from small_models import MODELS, WORDS, _encoder, ready, toy_of
from thinned import thinned
from toys import Toy, firsts

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.lifetimes import Lifetimes
from autopar.cost.memory.momentary import own_bytes
from autopar.cost.memory.point import Point
from autopar.cost.step import predict
from autopar.cost.structure.folds import MODEL
from autopar.graph import KIND, VAL, TensorRef, output_tensors
from autopar.plans import Segment
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.solution import Solution, segments_of
from autopar.strategies import strategies_for
from autopar.strategies.bind import Spot
from autopar.strategies.derive import positions_of
from autopar.strategies.members import RuledOp
from autopar.strategies.modes import Position
from autopar.strategies.positions import can_cut, position_at
from autopar.strategies.ragged import ragged


def _gemma2(layers: int) -> Any:
    """Two alternating kinds of layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Gemma2Config(
        num_hidden_layers=layers, head_dim=16, vocab_size=256, sliding_window=16, pad_token_id=0, **sizes
    )
    return transformers.Gemma2ForCausalLM(config)


def _t5(layers: int) -> Any:
    """Two stacks; the first layer of each makes its stack's shared bias, and all decoder layers read the encoder."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": 256}
    config = transformers.T5Config(**sizes, num_layers=layers, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def _returning(layers: int) -> Any:
    """The model returns the keys and values of every layer."""
    model = MODELS["llama-8"]()
    model.config.use_cache = True
    return model


OTHERS = {"gemma2-12": lambda: _gemma2(12), "t5-7": lambda: _t5(7), "llama-cache": lambda: _returning(8)}
OTHERS["albert-9"] = lambda: _encoder("Albert", "MaskedLM", 9, 64, embedding_size=32, **WORDS)
RETURNING = ["gemma2-12", "llama-cache"]
NAMES = ["gpt2-6", "gpt2-8-wide", "llama-8", "qwen3-6", "bert-8", "vit-4", *OTHERS]


@pytest.fixture(autouse=True)
def _more_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in OTHERS.items():
        monkeypatch.setitem(MODELS, name, make)


def _memories(toy: Toy, train: bool = True) -> tuple[StepMemory, StepMemory]:
    """Memory of the same step without and with folds: every block analysed, or equal ones once."""
    every = replace(toy.memory, train=train, device_kind="cuda")
    return every, replace(every, repeats=tuple(toy.repeats))


def _unordered(point: Point) -> tuple[object, ...]:
    """A point as a comparable value: only sums over `passing` and the other parts are used, so their order is free."""
    assert len(set(point.passing)) == len(point.passing)
    awaited, apart = set(point.awaited), set(point.apart)
    return point.node, point.backward, set(point.passing), point.made, set(point.over), awaited, apart


@pytest.mark.parametrize(("name", "mesh_shape"), thinned(2, NAMES, [(2,), (2, 4)]), ids=str)
def test_strategies(name: str, mesh_shape: tuple[int, ...]) -> None:
    asked = ready(name, 2)
    graph = asked.traced.graph
    once = strategies_for(graph, mesh_shape, repeats=asked.repeats)
    assert list(once.items()) == list(strategies_for(graph, mesh_shape).items())


@pytest.mark.parametrize(("name", "train"), thinned(2, NAMES, [True, False]))
def test_what_lives_at_every_point(name: str, train: bool) -> None:
    asked = ready(name, 2)
    every, once = _memories(toy_of(asked), train)
    assert bool(once.folds) == (name != "vit-4"), "of four blocks, none is left out"
    one, other = Lifetimes(every), once.lifetimes
    if train or name not in RETURNING:  # else the tensors that the caller holds grow with each block
        assert all(fold in other._folds for fold in once.folds), "blocks that looked alike are"
        assert len(other._nodes) < len(one._nodes) or not once.folds
    for node in (node for node in every.graph.nodes if node.op != "output"):
        assert list(map(_unordered, other.points(node))) == list(map(_unordered, one.points(node)))
        assert other.last_use(node) == one.last_use(node)
        assert other.after_parameters(node) == one.after_parameters(node)
        for point in one.points(node):
            for strategy in asked.strategies.get(node, ())[:3]:
                assert own_bytes(other, point, strategy) == own_bytes(one, point, strategy)
        at = one.position[node]
        for ref in (TensorRef(node, i) for i in range(len(output_tensors(node)))):
            assert once.roots[ref] == every.roots[ref]
            for first, last in ((at, at + 5), (at - 3, at + 60), (0, at + 200)):
                assert other.stays_within(ref, first, last) == one.stays_within(ref, first, last)
            assert once.is_kept(once.roots[ref]) == every.is_kept(every.roots[ref])


def _few(toy: Toy, seed: int) -> Toy:
    """Restrict each op to three random strategies, the same ones in equal blocks, so that plans differ."""
    draw = random.Random(seed)
    drawn: dict[Any, Any] = {}
    first = firsts(toy.graph, toy.repeats, toy.restricted.strategies)
    for node, options in toy.restricted.strategies.items():
        one = first.get(node)
        some = sorted(draw.sample(range(1, len(options)), min(2, len(options) - 1)))
        drawn[node] = drawn[one] if one in drawn else tuple(options[i] for i in [0, *some])
    return replace(toy, restricted=Restricted(drawn))


def _segments(toy: Toy, seed: int) -> Iterator[list[Segment]]:
    """No recompute, random recompute levels that fall from block to block, and random levels in any order."""
    draw = random.Random(seed)
    nodes = list(toy.graph.nodes)
    yield []
    for fall in (True, False):
        found: list[Segment] = []
        for stage in toy.problem().stages:
            if stage.levels is None or stage.repeat is None:
                continue
            levels = [draw.randint(0, stage.depth) for _ in range(stage.count)]
            for i, level in enumerate(sorted(levels, reverse=True) if fall else levels):
                span = stage.repeat.instance(stage.first + i)
                if level:
                    found += segments_of(toy.memory, nodes[span.start : span.stop], span.start, stage.levels, level)
        yield found


# gemma2-12 is also in the other tests, and its plans take as long as those of five other models together
PREDICTED = thinned(3, [name for name in NAMES if name != "gemma2-12"], [1, 3], [0, 1]) + [
    pytest.param("gemma2-12", micro_batches, seed, marks=pytest.mark.slow)
    for micro_batches in (1, 3)
    for seed in (0, 1)
]


@pytest.mark.parametrize(("name", "micro_batches", "seed"), PREDICTED)
def test_predictions(name: str, micro_batches: int, seed: int) -> None:
    asked = toy_of(ready(name, 4))
    toy = _few(replace(asked, memory=replace(asked.memory, micro_batches=micro_batches)), seed)
    solution: Solution = toy.solve(gap=1e-2)
    for segments in _segments(toy, seed):
        plan = toy.cluster, solution.chosen, solution.parameters, segments, toy.repeats
        for every, once in (_memories(toy), _memories(toy, train=False)):
            one, its, buckets = predict(every, *plan)
            other, collectives, same = predict(once, *plan)
            assert [(m.name, list(m.parts.items())) for m in other.moments] == [
                (m.name, list(m.parts.items())) for m in one.moments
            ]
            assert (other, collectives, same) == (one, its, buckets)


def test_a_block_that_differs_in_its_plan_is_looked_at() -> None:
    toy = _few(toy_of(ready("llama-8", 4)), 0)
    solution = toy.solve(gap=1e-2)
    [repeat] = toy.repeats
    nodes = list(toy.graph.nodes)
    inside = nodes[repeat.instance(MODEL + 2).start :][: repeat.period]  # the nodes of a block in the middle
    parameters = dict(solution.parameters)
    for node in filter(toy.memory.is_parameter, inside):
        storages = [way.outputs[0] for way in toy.restricted.strategies[node]]
        one = parameters[str(node.target)]
        parameters[one.name] = replace(one, storage=next(s for s in storages if s != one.storage))
    every, once = _memories(toy)
    plan = toy.cluster, solution.chosen, parameters, (), toy.repeats
    assert predict(once, *plan) == predict(every, *plan)
    assert predict(once, *plan) != predict(once, toy.cluster, solution.chosen, solution.parameters, (), toy.repeats)


@pytest.mark.parametrize("name", ["gpt2-6", "gemma2-12", "t5-7"])
def test_strategies_do_not_ask_what_calls_are_alike(name: str) -> None:
    asked = ready(name, 2, 2)
    graph = asked.traced.graph
    repeats = toy_of(asked).repeats
    assert any(KIND in node.meta for node in graph.nodes)
    for node in graph.nodes:
        node.meta.pop(KIND, None)
    assert strategies_for(graph, (2, 2)) == asked.strategies
    assert toy_of(asked).repeats == repeats


@pytest.mark.parametrize("name", ["gpt2-6", "t5-4", "gemma2-12"])
def test_positions_are_those_of_a_walk_over_all_nodes_until_nothing_changes(name: str) -> None:
    graph, mesh = ready(name, 2).traced.graph, (2, 2)
    members, found = positions_of(graph, mesh)
    uneven = ragged(members).factors
    spots: dict[TensorRef, set[Spot]] = {ref: set() for member in members.values() for ref in member.tensors}
    for node in graph.nodes:
        if node.op == "placeholder":
            spots[TensorRef(node, 0)] = {Spot(d, 1) for d, n in enumerate(node.meta[VAL].shape) if n > 1}
    walked: dict[Any, set[Position]] = {node: set() for node in members}
    before = -1
    while before != sum(map(len, spots.values())):
        before = sum(map(len, spots.values()))
        for node, member in members.items():
            assert isinstance(member.op, RuledOp)
            bound = member.op.bound
            places = [(t, spot) for t, ref in enumerate(member.tensors) for spot in spots[ref]]
            asked = [p for t, spot in places if (p := position_at(bound, t, spot)) is not None]
            asked += [Position(f, 1) for f in range(len(bound.factors)) if member.op.anchor]
            walked[node].update(p for p in asked if can_cut(bound, p, mesh, uneven[node]))
            for factor, outer in walked[node]:
                for ref, lies in zip(member.tensors, bound.spots, strict=True):
                    if (spot := lies[factor]) is not None:
                        spots[ref].add(Spot(spot.dim, spot.outer * outer))
    assert {node: tuple(sorted(some)) for node, some in walked.items()} == found
