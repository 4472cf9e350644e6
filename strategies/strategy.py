"""A strategy: one way to run one op over the mesh, in layouts."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.layout import Layout


@dataclass(frozen=True)
class InnerCollective:
    """A collective inside an op's local code (a vocabulary-sharded loss sums its exponentials).

    `forward_bytes` and `backward_bytes` are the per-device input bytes of one call; 0 is no call.
    """

    kind: str
    axis: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Strategy:
    """One way to run one node over the mesh.

    `inputs` are the layouts the op wants for its tensor inputs, in the order of
    `autopar.graph.tensor_inputs(node)`; `outputs` those of its tensor outputs. Both carry value and
    gradient (`Layout`): an input R+ says that this op yields a partial gradient for it, an output R+
    that it accepts one. `local` names the code that runs on local tensors in
    `autopar.runtime.local` ("" is the op itself on the shards). `work` is the part of the op's
    FLOPs and bytes that one device does (1 replicated, 1/n over an axis of n, more on the longest of unequal pieces).
    `factors` says for each axis what it splits: "" nothing, a factor, `factor@outer` at an inner digit, "P" or "R+"
    where a partial value or gradient passes through.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    factors: tuple[str, ...]
    local: str = ""
    work: float = 1.0
    inner: tuple[InnerCollective, ...] = ()
