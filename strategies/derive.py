"""From an annotated graph to the strategies of every node."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost.structure.blocks import Repeat
from autopar.errors import RuleError
from autopar.gradient_starts import RUN_WHOLE
from autopar.graph import (
    KIND,
    PLACE,
    ROWS,
    SCOPE,
    STATE,
    VAL,
    TensorRef,
    is_getitem,
    output_tensors,
    target_name,
    tensor_inputs,
    tensor_of,
)
from autopar.leaf_calls import LeafCall
from autopar.strategies import ends
from autopar.strategies.arguments import output_shapes, qualified_name, tensors, user_name
from autopar.strategies.bind import Bound, bind
from autopar.strategies.blocks import members_with_blocks
from autopar.strategies.constant import constants
from autopar.strategies.discovery import Found, discover
from autopar.strategies.members import Member, RuledOp, each_op
from autopar.strategies.modes import Passing, Position, TensorFact, axis_modes, combine
from autopar.strategies.outputs import choices
from autopar.strategies.passing import alike, worth_passing
from autopar.strategies.positions import useful_positions
from autopar.strategies.ragged import ragged
from autopar.strategies.state_rows import split_states
from autopar.strategies.strategy import Strategy
from autopar.strategies.table import bound_rule, entry, is_registered, parse
from autopar.user_warnings import AutoparWarning, warn


class NoRuleWarning(AutoparWarning):
    """An op has no sharding rule and runs replicated."""


def strategies_for(
    graph: fx.Graph, mesh_shape: tuple[int, ...], *, inputs: str = "global", repeats: Sequence[Repeat] = ()
) -> dict[fx.Node, tuple[Strategy, ...]]:
    """Every way to run each node over a mesh, all-replicated first.

    The nodes are those that yield a tensor, `getitem` on tuples excepted, and the output. Equal nodes share one
    tuple. `inputs="local"`: each rank passes its part of the batch, so placeholders may be sharded on dim 0.
    `repeats`: the graph's blocks (`cost.structure.blocks`), of which equal ones are looked at once; the answer is the
    same without. Warns once per op (`NoRuleWarning`) of one that has no rule.
    """
    mesh_shape = tuple(mesh_shape)
    constant = constants(graph)
    every = members_with_blocks(list(graph.nodes), repeats, constant, _Rules(constant).members)
    members = every.of
    uneven = ragged(members)
    positions = useful_positions(members, _sources(graph), mesh_shape, uneven.factors)
    parameters = {TensorRef(node, 0) for node in graph.nodes if node.op == "get_attr" and node not in constant}
    passing = alike(worth_passing(members, positions, parameters), members, positions)
    shared: dict[Hashable, tuple[Strategy, ...]] = {}
    ruled: dict[fx.Node, tuple[Strategy, ...]] = {}
    told: dict[Hashable, list[tuple[Strategy, ...]]] = {}  # of members, by node
    key: Hashable
    for node, (op, _) in members.items():
        key = (op, positions[node], passing[node], uneven.factors[node])
        if key not in told:
            told[key] = []
            for one, places, passes, cuts in each_op(*key):
                of_op = (one, places, passes, cuts)
                if of_op not in shared:
                    shared[of_op] = _of_op(one, places, passes, cuts, mesh_shape)
                told[key].append(shared[of_op])
        ruled.update(zip(every.nodes(node), told[key], strict=True))
    found: dict[fx.Node, tuple[Strategy, ...]] = {}
    for node in graph.nodes:
        if node in ruled:
            found[node] = ruled[node]
        elif node.op == "output":
            refs = tensor_inputs(node)
            dims = [sorted(_sharded_dims(found[ref.node], ref.index)) for ref in refs]
            ways = choices(refs, dims, members, positions)
            shapes = [tuple(tensor_of(ref).shape) for ref in refs]
            found[node] = ends.returned(shapes, ways, mesh_shape, [uneven.dims.get(ref, frozenset()) for ref in refs])
        elif output_tensors(node) and not is_getitem(node):
            given = "global" if STATE in node.meta or node.meta.get(ROWS) == -1 else inputs
            key = (
                node.op,
                given,
                STATE in node.meta,
                node in constant,
                tuple(TensorFact.of(t) for t in output_tensors(node)),
                _facts(node),
                uneven.dims.get(TensorRef(node, 0), frozenset()),
            )
            if key not in shared:
                shared[key] = _of_end(node, node in constant, mesh_shape, given, key[-1])
            found[node] = shared[key]
    return split_states(graph, found, mesh_shape) if inputs == "local" else found


def positions_of(graph: fx.Graph, mesh_shape: Sequence[int]) -> tuple[dict[fx.Node, Member], dict[fx.Node, Any]]:
    """The nodes under a rule, and where each is worth splitting."""
    members = _Rules(constants(graph)).members(graph.nodes)
    return members, useful_positions(members, _sources(graph), mesh_shape, ragged(members).factors)


def _sources(graph: fx.Graph) -> list[tuple[TensorRef, tuple[int, ...]]]:
    """The graph's inputs with their shapes."""
    return [
        (TensorRef(node, 0), tuple(node.meta[VAL].shape))
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get(VAL), torch.Tensor)
    ]


class _Rules:
    """Binds rules to nodes; those of calls of a kind to one of them. Nodes in `constant` have none."""

    def __init__(self, constant: Collection[fx.Node]) -> None:
        self.constant = constant
        self._signatures: dict[int, Hashable] = {}
        self._ops: dict[Hashable, RuledOp | None] = {}
        self._warned: set[str] = set()

    def members(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Member]:
        """The nodes under a rule, each with what it shares with its like."""
        members: dict[fx.Node, Member] = {}
        for node in nodes:
            if not _is_op(node) or node in self.constant:
                continue
            if isinstance(node.target, LeafCall) and node.target.rule is None:
                continue  # such a leaf runs whole: what it does with its inputs may depend on all of them
            refs = (*tensor_inputs(node), *(TensorRef(node, i) for i in range(len(output_tensors(node)))))
            op = self._op(node, refs)
            if op is not None:
                members[node] = Member(op, refs)
        return members

    def _op(self, node: fx.Node, refs: Sequence[TensorRef]) -> RuledOp | None:
        kind = node.meta.get(KIND)
        key = _signature(node) if kind not in self._signatures else self._signatures[kind]
        if kind is not None:
            self._signatures[kind] = key
        if key not in self._ops:
            bound = _bound(node, self._warned)
            facts = tuple(TensorFact.of(tensor_of(ref)) for ref in refs)
            self._ops[key] = (
                RuledOp(bound, facts, _is_anchor(node, bound), _is_of_table(node)) if bound is not None else None
            )
        return self._ops[key]


def _is_op(node: fx.Node) -> bool:
    """Whether a node computes tensors."""
    is_call = node.op in ("call_function", "call_method", "call_module")
    return is_call and not is_getitem(node) and bool(output_tensors(node))


def unruled(graph: fx.Graph, constant: Collection[fx.Node], members: Mapping[fx.Node, Member]) -> Iterator[fx.Node]:
    """The ops that no rule is for."""
    return (node for node in graph.nodes if _is_op(node) and node not in constant and node not in members)


def _is_anchor(node: fx.Node, bound: Bound) -> bool:
    """Whether the op's own factors are worth splitting; of a discovered one: some tensor lacks one of them."""
    found = entry(node)
    if found is not None:
        return found.anchor
    return any(spot is None for spots in bound.spots for spot in spots)


def _is_of_table(node: fx.Node) -> bool:
    """Whether a node's rule is the table's, and neither a user's nor a discovered one."""
    return entry(node) is not None and not is_registered(node) and not isinstance(node.target, LeafCall)


def _bound(node: fx.Node, warned: set[str]) -> Bound | None:
    """The node's rule bound to its shapes: the table's, the user's or a discovered one; None, with a warning, if none.

    A user's own rule that does not fit the node is an error.
    """
    if isinstance(node.target, LeafCall) and node.target.rule is not None:
        return bind(parse(node.target.rule), [tuple(t.shape) for t in tensors(node)], output_shapes(node))
    if node.target in RUN_WHOLE:
        return None
    if node.target == "copy_":  # new values of a buffer or an input, which every rank holds whole: nothing could split
        return None
    try:
        bound = bound_rule(node)
        reason = "has no sharding rule" + (" for these arguments" if entry(node) else "")
    except RuleError as error:
        if is_registered(node):
            raise RuleError(f"{qualified_name(node)}: {error.message}", where=_place(node)) from error
        bound, reason = None, f"has a sharding rule that does not fit it ({error})"
    if bound is not None:
        return bound
    found = discover(node)
    if found.rule is not None:
        try:
            return bind(parse(found.rule), [tuple(t.shape) for t in tensors(node)], output_shapes(node))
        except RuleError as error:
            found = Found(None, f"what was discovered does not fit it ({error})")
    name = user_name(node)
    if name not in warned:
        warned.add(name)
        place = _place(node)
        message = f"{name} {reason}, and {found.why}: it runs replicated{f' [at {place}]' if place else ''}"
        warn(message, NoRuleWarning)
    return None


def _place(node: fx.Node) -> str:
    scope = node.meta.get(SCOPE) or ()
    return ", ".join(filter(None, [scope[-1][0] if scope else "", node.meta.get(PLACE, "")]))


def _signature(node: fx.Node) -> Hashable:
    """What a node's strategies depend on; names and positions in the graph are not part of it."""

    def known(argument: Any) -> Any:
        return _Known(argument.meta.get(VAL)) if isinstance(argument, fx.Node) else argument

    arguments = fx.node.map_aggregate((node.args, node.kwargs), known)
    facts = repr([TensorFact.of(t) for t in output_tensors(node)])
    rule = node.target.rule if isinstance(node.target, LeafCall) else None
    return (node.op, target_name(node), rule, repr(arguments), facts)


class _Known:
    """Prints a node's value by its facts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, torch.Tensor):
            return repr((tuple(value.shape), value.dtype, value.requires_grad))
        if isinstance(value, (tuple, list)):
            return repr([_Known(item) for item in value])
        if isinstance(value, Mapping):
            return repr({key: _Known(item) for key, item in value.items()})
        return repr(value)


def _facts(node: fx.Node) -> tuple[TensorFact, ...]:
    return tuple(TensorFact.of(tensor_of(ref)) for ref in tensor_inputs(node))


def _of_op(
    op: RuledOp,
    positions: tuple[Position, ...],
    passing: Passing,
    uneven: frozenset[int],
    mesh_shape: tuple[int, ...],
) -> tuple[Strategy, ...]:
    return combine(op.bound, op.facts, axis_modes(op.bound, op.facts, positions, passing), mesh_shape, uneven)


def _of_end(
    node: fx.Node, constant: bool, mesh_shape: tuple[int, ...], inputs: str, uneven: frozenset[int]
) -> tuple[Strategy, ...]:
    outputs = output_tensors(node)
    if node.op == "get_attr" and not constant:
        return ends.stored(tuple(outputs[0].shape), mesh_shape, uneven)
    if node.op == "placeholder":
        return ends.given(tuple(outputs[0].shape), mesh_shape, inputs)
    return ends.replicated(len(tensor_inputs(node)), len(outputs), len(mesh_shape))


def _sharded_dims(strategies: tuple[Strategy, ...], output: int) -> set[int]:
    """The dims on which some strategy shards an output plainly."""
    placements = {p for strategy in strategies for p in strategy.outputs[output].placements}
    return {p.dim for p in placements if p.is_sharded and p.outer == 1}


def only_replicated(strategies: Mapping[fx.Node, tuple[Strategy, ...]]) -> Iterator[fx.Node]:
    """The nodes that no axis can split."""
    return (node for node, ways in strategies.items() if len(ways) == 1)
