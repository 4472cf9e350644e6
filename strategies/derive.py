"""Derives the strategies of every node of an annotated graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost.structure.blocks import Repeat
from autopar.graph import ROWS, STATE, VAL, TensorRef, is_getitem, output_tensors, tensor_inputs, tensor_of
from autopar.strategies import ends
from autopar.strategies.blocks import members_with_blocks
from autopar.strategies.constant import constants
from autopar.strategies.members import Member, RuledOp, each_op
from autopar.strategies.modes import Passing, Position, TensorFact, axis_modes, combine
from autopar.strategies.outputs import choices
from autopar.strategies.passing import same_for_equal_ops, worth_passing
from autopar.strategies.positions import useful_positions
from autopar.strategies.ragged import ragged
from autopar.strategies.ruled import Rules
from autopar.strategies.state_rows import split_states
from autopar.strategies.strategy import Strategy

Strategies = tuple[Strategy, ...]
"""The strategies of one node."""


def strategies_for(
    graph: fx.Graph, mesh_shape: tuple[int, ...], *, inputs: str = "global", repeats: Sequence[Repeat] = ()
) -> dict[fx.Node, Strategies]:
    """Every way to run each node over a mesh, all-replicated first.

    The nodes are those that yield a tensor, except `getitem` on tuples, and the output. Equal nodes share one tuple.
    `inputs="local"`: each rank passes its part of the batch, so placeholders may be sharded on dim 0.
    `repeats`: the graph's repeated blocks (`cost.structure.blocks`). Equal ones are analysed once; the result is the
    same without. Warns (`NoRuleWarning`) once for each op that has no rule.
    """
    derivation = _Derivation(graph, tuple(mesh_shape), inputs, repeats)
    ruled = derivation.of_ops()
    strategies: dict[fx.Node, Strategies] = {}
    for node in graph.nodes:
        if node in ruled:
            strategies[node] = ruled[node]
        elif node.op == "output":
            strategies[node] = derivation.of_output(node, strategies)
        elif output_tensors(node) and not is_getitem(node):
            strategies[node] = derivation.of_end(node)
    return split_states(graph, strategies, mesh_shape) if inputs == "local" else strategies


class _Derivation:
    """Derives the strategies of one graph's nodes; nodes with equal inputs to the derivation share one result."""

    def __init__(self, graph: fx.Graph, mesh_shape: tuple[int, ...], inputs: str, repeats: Sequence[Repeat]) -> None:
        self._mesh_shape, self._inputs = mesh_shape, inputs
        self._constant = constants(graph)
        self._every = members_with_blocks(list(graph.nodes), repeats, self._constant, Rules(self._constant).members)
        self._members = self._every.of
        self._uneven = ragged(self._members)
        self._positions = useful_positions(self._members, _sources(graph), mesh_shape, self._uneven.factors)
        self._parameters = {
            TensorRef(node, 0) for node in graph.nodes if node.op == "get_attr" and node not in self._constant
        }
        self._ends: dict[Hashable, Strategies] = {}

    def of_ops(self) -> dict[fx.Node, Strategies]:
        """The strategies of all nodes that have a rule, those inside blocks included."""
        members, positions = self._members, self._positions
        passing = same_for_equal_ops(worth_passing(members, positions, self._parameters), members, positions)
        of_op: dict[Hashable, Strategies] = {}
        of_member: dict[Hashable, list[Strategies]] = {}  # an entry for each node of the member
        strategies: dict[fx.Node, Strategies] = {}
        for node, (shared, _) in members.items():
            member = (shared, positions[node], passing[node], self._uneven.factors[node])
            if member not in of_member:
                ops = list(each_op(*member))
                for op in ops:
                    if op not in of_op:
                        ruled_op, places, passes, uneven = op
                        of_op[op] = _of_op(ruled_op, places, passes, uneven, self._mesh_shape)
                of_member[member] = [of_op[op] for op in ops]
            strategies.update(zip(self._every.nodes(node), of_member[member], strict=True))
        return strategies

    def of_output(self, node: fx.Node, strategies: Mapping[fx.Node, Strategies]) -> Strategies:
        """The strategies of the output node: the layouts in which the returned tensors' producers can leave them."""
        refs = tensor_inputs(node)
        dims = [sorted(_sharded_dims(strategies[ref.node], ref.index)) for ref in refs]
        ways = choices(refs, dims, self._members, self._positions)
        shapes = [tuple(tensor_of(ref).shape) for ref in refs]
        uneven = [self._uneven.dims.get(ref, frozenset()) for ref in refs]
        return ends.returned(shapes, ways, self._mesh_shape, uneven)

    def of_end(self, node: fx.Node) -> Strategies:
        """The strategies of a parameter, an input, or an op without a rule."""
        inputs = "global" if STATE in node.meta or node.meta.get(ROWS) == -1 else self._inputs
        is_constant, uneven = node in self._constant, self._uneven.dims.get(TensorRef(node, 0), frozenset())
        outputs = tuple(TensorFact.of(t) for t in output_tensors(node))
        key = (node.op, inputs, is_constant, outputs, _facts(node), uneven)
        if key not in self._ends:
            self._ends[key] = _of_end(node, is_constant, self._mesh_shape, inputs, uneven)
        return self._ends[key]


def positions_of(graph: fx.Graph, mesh_shape: Sequence[int]) -> tuple[dict[fx.Node, Member], dict[fx.Node, Any]]:
    """The nodes that have a rule as members, and the useful positions of each; repeats are not folded here."""
    members = Rules(constants(graph)).members(graph.nodes)
    return members, useful_positions(members, _sources(graph), mesh_shape, ragged(members).factors)


def _sources(graph: fx.Graph) -> list[tuple[TensorRef, tuple[int, ...]]]:
    """The graph's inputs with their shapes."""
    return [
        (TensorRef(node, 0), tuple(node.meta[VAL].shape))
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get(VAL), torch.Tensor)
    ]


def _facts(node: fx.Node) -> tuple[TensorFact, ...]:
    return tuple(TensorFact.of(tensor_of(ref)) for ref in tensor_inputs(node))


def _of_op(
    op: RuledOp,
    positions: tuple[Position, ...],
    passing: Passing,
    uneven: frozenset[int],
    mesh_shape: tuple[int, ...],
) -> Strategies:
    return combine(op.bound, op.facts, axis_modes(op.bound, op.facts, positions, passing), mesh_shape, uneven)


def _of_end(
    node: fx.Node, constant: bool, mesh_shape: tuple[int, ...], inputs: str, uneven: frozenset[int]
) -> Strategies:
    outputs = output_tensors(node)
    if node.op == "get_attr" and not constant:
        return ends.stored(tuple(outputs[0].shape), mesh_shape, uneven)
    if node.op == "placeholder":
        return ends.placeholder(tuple(outputs[0].shape), mesh_shape, inputs)
    return ends.replicated(len(tensor_inputs(node)), len(outputs), len(mesh_shape))


def _sharded_dims(strategies: Strategies, output: int) -> set[int]:
    """The dims on which some strategy shards output number `output` contiguously."""
    placements = {p for strategy in strategies for p in strategy.outputs[output].placements}
    return {p.dim for p in placements if p.is_sharded and p.outer == 1}


def only_replicated(strategies: Mapping[fx.Node, Strategies]) -> Iterator[fx.Node]:
    """The nodes with a single strategy, the replicated one."""
    return (node for node, ways in strategies.items() if len(ways) == 1)
