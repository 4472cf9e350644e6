"""Strategies of inputs, parameters and outputs, of ops without a rule, and of constants."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.errors import InputError
from autopar.graph import VAL
from autopar.strategies import NoRuleWarning, Strategy, strategies_for
from autopar.strategies.constant import constants
from autopar.tracing import trace


def meta(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, device="meta").requires_grad_(grad)


def node_of(graph: fx.Graph, op: str, target: Any, *args: Any, val: Any) -> fx.Node:
    node = graph.create_node(op, target, args)
    node.meta[VAL] = val
    return node


def layouts(ways: tuple[Strategy, ...]) -> list[str]:
    return [str(way.outputs[0]) for way in ways]


def one(op: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...], inputs: str = "global") -> list[str]:
    """The layouts that are offered for an input or a parameter."""
    graph = fx.Graph()
    value = nn.Parameter(meta(*shape)) if op == "get_attr" else meta(*shape)
    node = node_of(graph, op, "x", val=value)
    return layouts(strategies_for(graph, mesh_shape, inputs=inputs)[node])


def test_parameters_are_stored_plain() -> None:
    assert one("get_attr", (8, 6), (2,)) == ["R", "S0", "S1"]
    assert one("get_attr", (8, 6), (2, 2)) == ["R,R", "R,S0", "R,S1", "S0,R", "S0,S0@2", "S0,S1", "S1,R", "S1,S0"]


def test_a_parameter_that_no_dim_divides_may_be_ragged() -> None:
    assert one("get_attr", (7, 8), (2,)) == ["R", "S1"]
    assert one("get_attr", (7, 5), (2,)) == ["R", "S0", "S1"]
    assert one("get_attr", (3,), (8,)) == ["R"]
    # although the last five ranks then have no elements
    assert one("get_attr", (4096, 4096), (192,)) == ["R", "S0", "S1"]


def test_inputs_are_whole_or_each_rank_has_its_part() -> None:
    assert one("placeholder", (8, 6), (2, 2)) == ["R,R"]
    assert one("placeholder", (8, 6), (2, 2), "local") == ["S0,S0@2"]
    assert one("placeholder", (1, 6), (2,), "local") == ["R"]
    with pytest.raises(InputError, match="multiple of 2 rows"):
        one("placeholder", (7, 6), (2,), "local")


def test_an_axis_of_one_rank_splits_nothing() -> None:
    assert one("get_attr", (8, 6), (1, 2)) == ["R,R", "R,S0", "R,S1"]
    graph = fx.Graph()
    x = node_of(graph, "placeholder", "x", val=meta(4, 4))
    relu = node_of(graph, "call_function", torch.relu, x, val=meta(4, 4))
    assert layouts(strategies_for(graph, (1, 1))[relu]) == ["R,R"]


def test_outputs_may_stay_sharded_and_scalars_are_whole() -> None:
    graph = fx.Graph()
    x = node_of(graph, "placeholder", "x", val=meta(4, 6))
    logits = node_of(graph, "call_function", torch.relu, x, val=meta(4, 6))
    loss = node_of(graph, "call_method", "sum", logits, val=meta())
    output = graph.output((loss, logits, None))
    ways = strategies_for(graph, (2,))[output]
    assert [tuple(map(str, way.inputs)) for way in ways] == [("R", "R"), ("R", "S0"), ("R", "S1")]


def unknown(x: torch.Tensor) -> torch.Tensor:
    return x


def test_an_op_without_a_rule_is_replicated_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DISCOVERY", "0")
    graph = fx.Graph()
    x = node_of(graph, "placeholder", "x", val=meta(4, 6, grad=True))
    for _ in range(3):
        x = node_of(graph, "call_function", unknown, x, val=meta(4, 6, grad=True))
        x.meta["place"] = "model.py:7"
    with pytest.warns(
        NoRuleWarning, match=r"unknown has no sharding rule, and discovery is off.*\[at model.py:7\]"
    ) as caught:
        ways = strategies_for(graph, (2,))[x]
    assert len(caught) == 1
    assert layouts(ways) == ["R"]
    assert ways[0].inputs[0].is_replicated


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda x: x.fill_diagonal_(0.5), r"Tensor\.fill_diagonal_"),
        (lambda x: x.diagonal().fill_(0.5), r"a write into what Tensor\.diagonal returned"),
        (lambda x: x.__setitem__(([0, 1], [1, 2]), 0.5), r"Tensor\.__setitem__"),
    ],
)
def test_an_op_without_a_rule_is_called_what_the_user_wrote(
    write: Callable[[torch.Tensor], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            write(y)
            return y

    monkeypatch.setenv("AUTOPAR_DISCOVERY", "0")
    graph = trace(Writing(), {"x": meta(4, 6)}, remove_inplace=True).graph
    with pytest.warns(NoRuleWarning) as caught:
        strategies_for(graph, (2,))
    assert re.match(rf"{name} has no sharding rule", str(caught[-1].message))


def test_what_is_written_into_a_buffer_is_held_whole_without_a_warning() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("seen").lerp_(x.mean(0), 0.1)
            return x - self.get_buffer("seen")

    graph = trace(Running(), {"x": meta(4, 6)}, remove_inplace=True).graph
    [written] = [node for node in graph.nodes if node.target == "copy_"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoRuleWarning)
        ways = strategies_for(graph, (2,))
    assert written not in ways or layouts(ways[written]) == ["R"]


def test_a_leaf_module_is_replicated() -> None:
    graph = fx.Graph()
    x = node_of(graph, "placeholder", "x", val=meta(4, 6))
    leaf = node_of(graph, "call_module", "inner", x, val=(meta(4, 6), meta(4)))
    with pytest.warns(NoRuleWarning):
        ways = strategies_for(graph, (2,))[leaf]
    assert [tuple(map(str, way.outputs)) for way in ways] == [("R", "R")]


def test_what_no_input_reaches_is_constant() -> None:
    graph = fx.Graph()
    x = node_of(graph, "placeholder", "x", val=meta(4))
    buffer = node_of(graph, "get_attr", "b", val=meta(4))
    weight = node_of(graph, "get_attr", "w", val=nn.Parameter(meta(4), requires_grad=False))
    steps = node_of(graph, "call_function", torch.arange, 4, val=meta(4))
    table = node_of(graph, "call_function", torch.mul, buffer, steps, val=meta(4))
    used = node_of(graph, "call_function", torch.mul, table, x, val=meta(4))
    scaled = node_of(graph, "call_function", torch.mul, table, weight, val=meta(4))
    read, alone, scores = (node_of(graph, "call_function", torch.zeros, 4, val=meta(4)) for _ in range(3))
    node_of(graph, "call_function", torch.add, read, steps, val=meta(4))
    node_of(graph, "call_function", torch.add, scores, x, val=meta(4))
    node_of(graph, "call_function", torch.add, scores, weight, val=meta(4))
    assert constants(graph) >= {buffer, steps, table, read}
    assert constants(graph).isdisjoint({x, weight, used, scaled, alone, scores}), "a filling for others alone"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategies = strategies_for(graph, (2,))
    assert layouts(strategies[table]) == ["R"]
    assert len(strategies[used]) > 1
    assert layouts(strategies[scaled])[0] == "R"


def test_partial_gradients_only_where_a_gradient_flows() -> None:
    graph = fx.Graph()
    x = node_of(graph, "placeholder", "x", val=meta(4, 6))
    frozen = node_of(graph, "get_attr", "w", val=meta(6, 6, grad=True))
    product = node_of(graph, "call_function", nn.functional.linear, x, frozen, val=meta(4, 6, grad=True))
    by_output = {way.factors[0]: tuple(map(str, way.inputs)) for way in strategies_for(graph, (2,))[product]}
    assert by_output == {"": ("R", "R"), "...0": ("S0", "R+"), "i": ("S1", "S1"), "o": ("R", "S0")}


class Masked(nn.Module):
    """Makes its mask of ones for every row, as models of transformers do without a given mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        mask = torch.ones(rows, length, dtype=torch.bool, device=x.device)
        return x.masked_fill((mask[:, :, None] & mask[:, None, :]).logical_not(), 0.0)


@pytest.mark.parametrize(("length", "split"), [(2048, True), (256, False)])
def test_a_large_constant_is_split_with_what_reads_it(length: int, split: bool) -> None:
    graph = trace(Masked(), {"x": meta(8, length, length)}).graph
    ways = strategies_for(graph, (2,))
    for name in ("and_1", "logical_not"):
        [node] = [node for node in graph.nodes if node.name == name]
        assert ("S0" in layouts(ways[node])) is split
    [ones] = [node for node in graph.nodes if node.target is torch.ones]
    assert layouts(ways[ones]) == ["R"], "what it is made of is small"
