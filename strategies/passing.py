"""Which partial values and partial gradients are worth passing through an op.

Every linear op can pass a partial sum on instead of having it joined first, and most of the time that only doubles
the choices: joining costs the same on either side. It is worth having where it ends in a gain:

- a partial value that later meets another partial value in a sum (one join in place of two), or becomes smaller;
- a partial gradient whose way back leads to a parameter (there it is reduced and scattered at once, and in the
  parameter's dtype), or to a smaller tensor (`expand` of key and value heads, a cast to a wider dtype).

A product of low rank, as adapters have them, passes partial values too: it does then all its work on every rank, and
its own joins what the product beside it left.

So both flow through the graph: partial values forward from the ops that make them, the wish for them backward from
the gains; the wish for partial gradients forward from parameters and from ops whose output is larger than the input.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.modes import Passing, Position, TensorFact, everything_passes
from autopar.strategies.positions import Member, RuledOp

_MOST_ORIGINS = 8  # of a partial value that are told apart
_LOW_RANK = 8  # a product whose inner dim is so many times shorter than its outer one is cheap enough to be done whole


class _Ways(NamedTuple):
    """What equal nodes may pass: groups of operands of partial values, those worth asking about each with whether one
    of its operands becomes smaller; partial gradients, and of which inputs all must lead to a gain (None: it is one).
    """

    possible: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
    gradient: bool
    gains: tuple[int, ...] | None


def worth_passing(
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, tuple[Position, ...]],
    parameters: set[TensorRef],
) -> dict[fx.Node, Passing]:
    """For each node, in graph order, what is to pass through it. `parameters` are the stored tensors."""
    ways = {op: _ways(op) for op in dict.fromkeys(member.op for member in members.values())}
    origins = _origins(members, positions, ways)
    values = _values(members, ways, origins)
    gradients = _gradients(members, ways, parameters)
    return {node: Passing(values[node], gradients[node]) for node in members}


def alike(passing: Mapping[fx.Node, Passing], kinds: Mapping[fx.Node, Hashable]) -> dict[fx.Node, Passing]:
    """What passes through any op of a kind passes through all of them.

    The first of several equal blocks has other neighbours than the rest, and only blocks whose ops have the same
    strategies can be solved as one.
    """
    found: dict[Hashable, Passing] = {}
    for node, mine in passing.items():
        before = found.get(kinds[node], Passing((), False))
        groups = before.groups + tuple(g for g in mine.groups if g not in before.groups)
        found[kinds[node]] = Passing(groups, before.gradient or mine.gradient)
    return {node: found[kinds[node]] for node in passing}


def _ways(op: RuledOp) -> _Ways:
    bound, sizes = op.bound, [_bytes(fact) for fact in op.facts]
    possible, contracted = everything_passes(bound, op.facts), _contracted(bound)
    made = sum(sizes[bound.inputs :])
    groups = tuple(
        (group, tuple(made < sizes[i] for i in group))
        for group in possible.groups
        if contracted == 1 or all(_LOW_RANK * contracted <= _brought(bound, i) for i in group)
    )
    inputs = tuple(i for i in range(bound.inputs) if op.facts[i].grad)
    grows = made > sum(sizes[i] for i in inputs)
    return _Ways(possible.groups, groups, possible.gradient and contracted == 1, None if grows else inputs)


def _origins(
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, tuple[Position, ...]],
    ways: Mapping[RuledOp, _Ways],
) -> dict[TensorRef, frozenset[fx.Node]]:
    """The ops that make the partial values which can reach a tensor."""
    found: dict[TensorRef, frozenset[fx.Node]] = {}
    makes: dict[tuple[RuledOp, tuple[Position, ...]], list[bool]] = {}  # by output
    for node, (op, tensors) in members.items():
        arriving: frozenset[fx.Node] = frozenset()
        for group in ways[op].possible:
            arriving = arriving.union(*(found.get(tensors[i], frozenset()) for i in group))
        key = op, positions[node]
        if key not in makes:
            outputs = range(op.bound.inputs, len(tensors))
            makes[key] = [any(_leaves_summands(op.bound, p, t) for p in positions[node]) for t in outputs]
        for ref, own in zip(tensors[op.bound.inputs :], makes[key], strict=True):
            origin = arriving | {node} if own else arriving
            if origin:
                found[ref] = origin if len(origin) <= _MOST_ORIGINS else frozenset({node})
    return found


def _leaves_summands(bound: Bound, position: Position, output: int) -> bool:
    """Whether splitting there makes tensor number `output` partial by sum."""
    note = bound.factors[position.factor].note
    return bound.spots[output][position.factor] is None and note.join == "sum" and "whole" not in note.words


def _values(
    members: Mapping[fx.Node, Member],
    ways: Mapping[RuledOp, _Ways],
    origins: Mapping[TensorRef, frozenset[fx.Node]],
) -> dict[fx.Node, tuple[tuple[int, ...], ...]]:
    """The groups of operands in which partial values are to pass, found from the last node to the first."""
    wanted: set[TensorRef] = set()
    kept: dict[fx.Node, tuple[tuple[int, ...], ...]] = {}
    for node in reversed(list(members)):
        op, tensors = members[node]
        groups = []
        for group, smaller in ways[op].groups:
            arriving = [i for i in group if tensors[i] in origins]
            if not arriving:
                continue
            merges = len(arriving) > 1 and len({origins[tensors[i]] for i in arriving}) > 1
            alone = {i for i in arriving if len(tensors[i].node.users) == 1}  # else it is joined for others anyway
            shrinks = any(less and i in alone for i, less in zip(group, smaller, strict=True))
            if merges or shrinks or (alone and any(ref in wanted for ref in tensors[op.bound.inputs :])):
                groups.append(group)
                wanted.update(tensors[i] for i in arriving)
        kept[node] = tuple(groups)
    return kept


def _gradients(
    members: Mapping[fx.Node, Member], ways: Mapping[RuledOp, _Ways], parameters: set[TensorRef]
) -> dict[fx.Node, bool]:
    """The ops through which partial gradients are to pass, found from the first node to the last."""
    leads_to_gain = set(parameters)
    kept: dict[fx.Node, bool] = {}
    for node, (op, tensors) in members.items():
        gains = ways[op].gains
        kept[node] = ways[op].gradient and (gains is None or all(tensors[i] in leads_to_gain for i in gains))
        if kept[node]:
            leads_to_gain.update(tensors[op.bound.inputs :])
    return kept


def _contracted(bound: Bound) -> int:
    """How long the index is that a product sums over; 1 for an op that is none."""
    lost = [f.size for k, f in enumerate(bound.factors) if all(s[k] is None for s in bound.spots[bound.inputs :])]
    return math.prod(lost) if bound.operation.operands else 1


def _brought(bound: Bound, operand: int) -> int:
    """How long the indices of a product's result are that one operand does not have."""
    result = bound.spots[-1]
    own = [k for k, spot in enumerate(result) if spot is not None and bound.spots[operand][k] is None]
    return math.prod(bound.factors[k].size for k in own)


def _bytes(fact: TensorFact) -> int:
    return math.prod(fact.shape) * fact.item_bytes
