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
from typing import Any

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.members import Member, RuledBlock, RuledOp, each_op
from autopar.strategies.modes import Passing, TensorFact, everything_passes
from autopar.strategies.partials import Gradients, Origins, Values, Ways

_LOW_RANK = 8  # a product whose inner dim is so many times shorter than its outer one is cheap enough to be done whole


def worth_passing(
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, Any],
    parameters: set[TensorRef],
) -> dict[fx.Node, Any]:
    """For each node, in graph order, what is to pass through it: a `Passing`. `parameters` are the stored tensors."""
    every = (some for member in members.values() for (some,) in each_op(member.op))
    ways = {op: _ways(op) for op in dict.fromkeys(every)}
    reach = Origins(ways).of(members, positions)
    values = Values(ways).of(members, reach, set(), lambda ref: len(ref.node.users) == 1)
    gradients = Gradients(ways).of(members, set(parameters))
    return {
        node: Passing(values[node], gradients[node])
        if isinstance(member.op, RuledOp)
        else tuple(map(Passing, values[node], gradients[node]))
        for node, member in members.items()
    }


def alike(
    passing: Mapping[fx.Node, Any], members: Mapping[fx.Node, Member], positions: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any]:
    """What passes through any op of a kind passes through all of them. Ops of a kind have the same positions.

    The first of several equal blocks has other neighbours than the rest, and only blocks whose ops have the same
    strategies can be solved as one.
    """
    found: dict[Hashable, Passing] = {}
    for op, some, mine in dict.fromkeys((members[node].op, positions[node], passing[node]) for node in passing):
        for one, places, own in each_op(op, some, mine):
            before = found.get((one, places), Passing((), False))
            groups = before.groups + tuple(g for g in own.groups if g not in before.groups)
            found[one, places] = Passing(groups, before.gradient or own.gradient)
    shared = {
        (op, some): tuple(found[one, places] for one, places in each_op(op, some))
        for op, some in dict.fromkeys((members[node].op, positions[node]) for node in passing)
    }
    return {
        node: told if isinstance(members[node].op, RuledBlock) else told[0]
        for node in passing
        for told in [shared[members[node].op, positions[node]]]
    }


def _ways(op: RuledOp) -> Ways:
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
    return Ways(possible.groups, groups, possible.gradient and contracted == 1, None if grows else inputs)


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
