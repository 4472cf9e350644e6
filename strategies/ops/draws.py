"""Random numbers in the shape of a tensor: drawn by global index, so that they are the same for every sharding."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, tensors, value

DRAWN = "... -> ... | @drawn always"


def in_place(node: fx.Node) -> str | None:
    """`apply_inplace(method, base, *options)`: methods that fill a tensor with random numbers."""
    by_counter = node.args[0] in ("uniform_", "normal_", "bernoulli_", "exponential_")
    return DRAWN if by_counter and len(tensors(node)) == 1 else None


def bernoulli(node: fx.Node) -> str | None:
    """`bernoulli(input)`: each element of a floating input is the probability of its own draw."""
    return DRAWN if value(node.args[0]).is_floating_point() else None


RULES: dict[str, str | Writer] = {"rand_like randn_like": DRAWN, "bernoulli": bernoulli, "apply_inplace": in_place}
