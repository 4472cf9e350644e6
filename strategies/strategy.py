"""A strategy: the layouts in which one op runs over the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.layout import Layout


@dataclass(frozen=True)
class InnerCollective:
    """A collective inside an op's local code (a vocabulary-sharded loss sums its exponentials).

    `forward_bytes` and `backward_bytes`: what one device hands in to the call in that pass; 0: there is no call.
    """

    kind: str
    axis: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Strategy:
    """One way to run one node over the mesh.

    `inputs` are the layouts that the op requires of its tensor inputs, in the order of
    `autopar.graph.tensor_inputs(node)`; `outputs` are those of its tensor outputs. Each describes value and gradient
    (`Layout`): R+ of an input means that this op yields a partial gradient for it, R+ of an output that it accepts one.
    `local` names the code in `autopar.runtime.local` that runs on local tensors ("": the op itself, on the shards).
    `work` is the part of the op's FLOPs and bytes that one device does: 1 if replicated, 1/n if split over an axis of
    n, more on the longest of unequal pieces. `factors` says for each axis what it splits: "" nothing, a factor's name,
    `factor@outer` for an inner digit, "P" or "R+" where a partial value or gradient passes through.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    factors: tuple[str, ...]
    local: str = ""
    work: float = 1.0
    inner: tuple[InnerCollective, ...] = ()
