"""Which partial values and partial gradients are worth passing through an op.

Every linear op can pass a partial sum on instead of having it reduced first. Mostly this only doubles the number of
strategies, because the reduction costs the same before and after the op. It is allowed only where it leads to a gain:

- a partial value is later added to another partial value (one reduction in place of two), or becomes smaller before it
  is reduced;
- a partial gradient leads back to a parameter (there one reduce-scatter does it, in the parameter's dtype), or to a
  smaller tensor (before `expand` of key and value heads, before a cast to a wider dtype).

A product of low rank, such as an adapter's, may pass partial values too. It then does all its work on every rank, but
its partial result is added to that of the product beside it, and both are reduced at once.

Hence three passes: partial values flow forward from the ops that make them; the wish for partial values flows backward
from where they are a gain; the wish for partial gradients flows forward from parameters and from ops whose output is
larger than their inputs.
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

# A product is of low rank if the dim that it sums over is at least this many times shorter than the dim that it
# replaces it by. Such a product is cheap enough for every rank to do all of it.
_LOW_RANK = 8


def worth_passing(
    members: Mapping[fx.Node, Member],
    positions: Mapping[fx.Node, Any],
    parameters: set[TensorRef],
) -> dict[fx.Node, Any]:
    """For each member, in graph order, what should pass through it: a `Passing`, or a tuple of them for a block.

    `parameters` are the stored tensors.
    """
    every = (ruled_op for member in members.values() for (ruled_op,) in each_op(member.op))
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


def same_for_equal_ops(
    passing: Mapping[fx.Node, Any], members: Mapping[fx.Node, Member], positions: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any]:
    """Let everything that passes through one op pass through all equal ops (same `RuledOp` and positions).

    Equal blocks can be solved as one only if their ops have the same strategies, but the first of them has other
    neighbours than the rest, so that other things may pass through it.
    """
    merged: dict[Hashable, Passing] = {}
    for op, positions_of_op, passings in dict.fromkeys(
        (members[node].op, positions[node], passing[node]) for node in passing
    ):
        for like, places, own in each_op(op, positions_of_op, passings):
            before = merged.get((like, places), Passing((), False))
            groups = before.groups + tuple(g for g in own.groups if g not in before.groups)
            merged[like, places] = Passing(groups, before.gradient or own.gradient)
    shared = {
        (op, positions_of_op): tuple(merged[like, places] for like, places in each_op(op, positions_of_op))
        for op, positions_of_op in dict.fromkeys((members[node].op, positions[node]) for node in passing)
    }
    return {
        node: passing_of_op if isinstance(members[node].op, RuledBlock) else passing_of_op[0]
        for node in passing
        for passing_of_op in [shared[members[node].op, positions[node]]]
    }


def _ways(op: RuledOp) -> Ways:
    """What may pass through an op by its rule, and whether the op itself is a gain."""
    bound, sizes = op.bound, [_bytes(fact) for fact in op.facts]
    possible, contracted = everything_passes(bound, op.facts), _contracted(bound)
    output_bytes = sum(sizes[bound.inputs :])
    groups = tuple(
        (group, tuple(output_bytes < sizes[i] for i in group))
        for group in possible.groups
        if contracted == 1 or all(_LOW_RANK * contracted <= _brought(bound, i) for i in group)
    )
    inputs = tuple(i for i in range(bound.inputs) if op.facts[i].grad)
    grows = output_bytes > sum(sizes[i] for i in inputs)
    return Ways(possible.groups, groups, possible.gradient and contracted == 1, None if grows else inputs)


def _contracted(bound: Bound) -> int:
    """The length of what a product sums over; 1 for an op that is not a product."""
    lost = [f.size for k, f in enumerate(bound.factors) if all(s[k] is None for s in bound.spots[bound.inputs :])]
    return math.prod(lost) if bound.operation.operands else 1


def _brought(bound: Bound, operand: int) -> int:
    """The number of elements over those indices of a product's result that operand `operand` does not have."""
    result = bound.spots[-1]
    own = [k for k, spot in enumerate(result) if spot is not None and bound.spots[operand][k] is None]
    return math.prod(bound.factors[k].size for k in own)


def _bytes(fact: TensorFact) -> int:
    return math.prod(fact.shape) * fact.item_bytes
