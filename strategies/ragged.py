"""Which dims may be cut into unequal pieces: the vocabulary, all the way from the embedding to the loss.

Activations are sharded evenly: a dim that the mesh does not divide would have to be padded in every collective. The
exception is a factor that a rule calls `ragged` (the vocabulary of embeddings and losses; GPT-2's is 50257 = 29 x
1733). This factor, and the dims of other tensors that are the same index, may be cut as `torch.chunk` and DTensor cut:
in pieces of `ceil(length / n)`, the last one shorter. The permission travels along the rules, forward and backward,
through every op that is *local* on the factor, that is, does the same on a piece of any length (the head, and the casts
and views between it and the loss). It stops at other ops: views that cut the dim, means over it, exchanges.

No piece may be empty, since ops differ in what they do with an empty tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.members import Flow, Member, RuledOp, Set, touching_nodes

# Local code that looks up where a rank's piece begins and how long it is, and does not assume pieces of length / n.
_KNOWS_LENGTHS = {
    "", "shape", "split", "slice", "masked_scatter", "dropout", "drawn", "embedding_vocab", "cross_entropy",
    "log_softmax", "extremum", "instance_norm",
}  # fmt: skip


class Ragged(NamedTuple):
    """What may be cut into unequal pieces: for each member the numbers of its factors, for each tensor its dims."""

    factors: Mapping[fx.Node, Any]
    dims: Mapping[TensorRef, frozenset[int]]


def local_factors(bound: Bound) -> frozenset[int]:
    """The factors on which an op is local: it does the same on a piece of any length. Only for rules of the table."""
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
    """Which factors and dims may be cut into unequal pieces. The permission passes only through rules of the table:
    rules of users and discovered ones were never tested on unequal pieces."""
    touching = touching_nodes(members)
    flow = _Leave()
    dims = dict.fromkeys(touching, flow.interned(frozenset()))
    return Ragged(flow.settle(members, touching, dims, {}), dims)


class _Leave(Flow):
    """Propagates the permission to be cut into unequal pieces. The set of a tensor has its dims that may be; the result
    for an op is its factors that may be."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[RuledOp, tuple[frozenset[int], frozenset[int]]] = {}

    def through(self, op: RuledOp, current: tuple[Set, ...], extra: Any) -> tuple[Any, tuple[Set, ...]]:
        """The factors that may be cut: those that the rule calls ragged, and local ones that some tensor's dims
        reach."""
        stated, travels = self._factors(op)
        spots = op.bound.spots
        reached = {
            factor
            for factor in travels - stated
            if any(
                (spot := spots_of[factor]) is not None and spot.dim in dims
                for dims, spots_of in zip(current, spots, strict=True)
            )
        }
        cuttable = stated | reached
        after = []
        for dims, spots_of in zip(current, spots, strict=True):
            after.append(
                self.interned(dims | {spot.dim for factor in cuttable if (spot := spots_of[factor]) is not None})
            )
        return frozenset(cuttable), tuple(after)

    def _factors(self, op: RuledOp) -> tuple[frozenset[int], frozenset[int]]:
        """The factors that the rule calls ragged, and those on which the op is local."""
        if op not in self._own:
            self._own[op] = stated_factors(op.bound), local_factors(op.bound) if op.of_table else frozenset()
        return self._own[op]
