"""Which dims may be cut into unequal pieces: the vocabulary, all the way from the embedding to the loss.

Activations are sharded evenly, or a dim that the mesh does not divide would have to be padded wherever ranks meet. A
factor that a rule calls `ragged` is the exception (the vocabulary of embeddings and losses; GPT-2's is 50257 = 29 x
1733): it and what is the same index in other tensors may be cut as `torch.chunk` and DTensor cut, in pieces of
`ceil(length / n)` of which the last is shorter. From there the leave travels along the rules, forward and backward,
through every op that is *local* on the factor: which does the same on a piece of any length, as the head and the casts
and views between it and the loss. It ends at ops that are not: views that cut the dim, means over it, exchanges.

No piece may be empty, for ops differ in what they do with nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.positions import Member, RuledOp, touching_nodes

# local code that asks where a piece begins and how long it is, in place of dividing by the number of pieces
_KNOWS_LENGTHS = {
    "", "shape", "split", "slice", "masked_scatter", "dropout", "drawn", "embedding_vocab", "cross_entropy",
    "log_softmax",
}  # fmt: skip


class Ragged(NamedTuple):
    """The factors of each node, by number, and the dims of each tensor that may be cut into unequal pieces."""

    factors: Mapping[fx.Node, frozenset[int]]
    dims: Mapping[TensorRef, frozenset[int]]


def local_factors(bound: Bound) -> frozenset[int]:
    """The factors of a rule of the table on which its op does the same on a piece of any length."""
    if bound.operation.local not in _KNOWS_LENGTHS:
        return frozenset()
    exchanged = {name for note in bound.rule.notes for name in note.pair}
    return frozenset(
        number
        for number, factor in enumerate(bound.factors)
        if factor.splits_at(1)
        and factor.alone
        and factor.name not in exchanged
        and factor.note.join != "mean"
        and factor.note.local in _KNOWS_LENGTHS
    )


def stated_factors(bound: Bound) -> frozenset[int]:
    """The factors that the rule itself calls ragged."""
    return frozenset(k for k, f in enumerate(bound.factors) if "ragged" in f.note.words and f.splits_at(1))


def ragged(members: Mapping[fx.Node, Member]) -> Ragged:
    """Where uneven pieces may lie; of other rules than the table's, none was run on uneven pieces."""
    by_op: dict[RuledOp, tuple[frozenset[int], frozenset[int]]] = {}
    for op in {member.op for member in members.values()}:
        stated = stated_factors(op.bound)
        by_op[op] = stated, stated | (local_factors(op.bound) if op.of_table else frozenset())
    touching = touching_nodes(members)
    dims: dict[TensorRef, set[int]] = {}
    found = {node: set(by_op[member.op][0]) for node, member in members.items()}
    queue = deque(node for node in members if found[node])
    while queue:
        node = queue.popleft()
        member = members[node]
        for factor in by_op[member.op][1] - found[node]:
            lies = ((dims.get(ref, ()), s[factor]) for ref, s in zip(member.tensors, member.bound.spots, strict=True))
            if any(spot is not None and spot.dim in marked for marked, spot in lies):
                found[node].add(factor)
        for ref, spots in zip(member.tensors, member.bound.spots, strict=True):
            marked = dims.setdefault(ref, set())
            new = {spot.dim for factor in found[node] if (spot := spots[factor]) is not None} - marked
            if new:
                marked |= new
                queue.extend(touching[ref])
    none: frozenset[int] = frozenset()
    factors = {node: frozenset(some) if some else none for node, some in found.items()}
    return Ragged(factors, {ref: frozenset(some) for ref, some in dims.items()})
