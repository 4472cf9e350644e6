"""Ops that draw random numbers, by their names; what has local code of its own for that is not among them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket  # private: there is no other name for what `torch.ops` holds

BY_COUNTER = {"rand", "rand_like", "uniform", "bernoulli", "randn", "randn_like", "normal", "exponential"}
"""Made of uniform numbers: a rank can draw its own part alone, from a counter over global indices."""

SEEDED = {"randint", "randint_like", "randperm", "multinomial", "poisson", "binomial", "geometric"}
SEEDED |= {"log_normal", "cauchy", "random", "rrelu", "alpha_dropout", "feature_alpha_dropout"}
SEEDED |= {"fractional_max_pool2d", "fractional_max_pool3d", "standard_gamma", "sample_dirichlet"}
SEEDED |= {"fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
SEEDED |= {"native_dropout", "feature_dropout", "fused_dropout", "rrelu_with_noise", "normal_functional"}
"""What every rank draws whole; so it does what a custom op draws that says so (`nondeterministic_seeded`)."""


def draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers, and local code for dropout or attention does not draw them if it may."""
    if node.op not in ("call_function", "call_method"):
        return False
    call = node.args[0] if drawn_name(node.target) == "apply_inplace" else node.target
    inside = getattr(call, "draws", False)  # as a `torch.autograd.Function` may
    return inside is True or is_random(call)


def is_random(call: Any) -> bool:
    """Whether a function, a method by its name, or an operator draws random numbers."""
    return drawn_name(call) in BY_COUNTER | SEEDED or is_random_operator(call)


def drawn_name(target: Any) -> str:
    """The name of a function, a method or an operator, without underscores around it and without its overload.

    >>> drawn_name(torch.ops.aten.bernoulli_.float)
    'bernoulli'
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.partition(".")[0].strip("_") if isinstance(target, OpOverload) else name.strip("_")


def is_random_operator(target: Any) -> bool:
    """Whether an operator has the tag that its numbers come from a generator; of torch's own only `aten.dropout`, for
    which there is no local code."""
    if isinstance(target, OpOverloadPacket):
        return any(is_random_operator(getattr(target, name)) for name in target.overloads())
    if not isinstance(target, OpOverload) or (target.namespace == "aten" and drawn_name(target) != "dropout"):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags
