"""Ops that draw random numbers, by name; not those whose local code does so (dropout, attention)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket  # private: there is no other name for what `torch.ops` holds

BY_COUNTER = {"rand", "rand_like", "uniform", "bernoulli", "randn", "randn_like", "normal", "exponential"}
"""Ops whose numbers can be computed from uniform ones: a rank draws only its own part, from a counter over global
indices."""

SEEDED = {"randint", "randint_like", "randperm", "multinomial", "poisson", "binomial", "geometric"}
SEEDED |= {"log_normal", "cauchy", "random", "rrelu", "alpha_dropout", "feature_alpha_dropout"}
SEEDED |= {"fractional_max_pool2d", "fractional_max_pool3d", "standard_gamma", "sample_dirichlet"}
SEEDED |= {"fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
SEEDED |= {"native_dropout", "feature_dropout", "fused_dropout", "rrelu_with_noise", "normal_functional"}
"""Ops whose result every rank draws whole, as also for custom ops that have the tag `nondeterministic_seeded`."""


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers other than through the local code of dropout or attention."""
    if node.op not in ("call_function", "call_method"):
        return False
    call = node.args[0] if drawn_name(node.target) == "apply_inplace" else node.target
    inside = getattr(call, "draws", False)  # set on nodes whose code draws, such as an autograd function
    return inside is True or is_random(call)


def is_random(call: Any) -> bool:
    """Whether a function, a method (by its name) or an operator draws random numbers."""
    return drawn_name(call) in BY_COUNTER | SEEDED or is_random_operator(call)


def drawn_name(target: Any) -> str:
    """The name of a function, method or operator, without surrounding underscores and without the overload.

    >>> drawn_name(torch.ops.aten.bernoulli_.float)
    'bernoulli'
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.partition(".")[0].strip("_") if isinstance(target, OpOverload) else name.strip("_")


def is_random_operator(target: Any) -> bool:
    """Whether an operator is tagged as drawing from a generator.

    Of torch's own operators only `aten.dropout` counts, which has no local code; the others are listed by name.
    """
    if isinstance(target, OpOverloadPacket):
        return any(is_random_operator(getattr(target, name)) for name in target.overloads())
    if not isinstance(target, OpOverload) or (target.namespace == "aten" and drawn_name(target) != "dropout"):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags
