"""Ops that draw random numbers, by their names; dropout and attention are not among them."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket  # private: there is no other name for what `torch.ops` holds

BY_COUNTER = {"rand", "rand_like", "uniform", "bernoulli", "randn", "randn_like", "normal"}
"""Uniform and normal numbers: a rank can draw its own part from a counter over global indices."""

SEEDED = {"randint", "randint_like", "randperm", "multinomial", "poisson", "binomial", "exponential", "geometric"}
SEEDED |= {"log_normal", "cauchy", "random", "rrelu", "gumbel_softmax", "alpha_dropout", "feature_alpha_dropout"}
SEEDED |= {"fractional_max_pool2d", "fractional_max_pool3d", "standard_gamma", "sample_dirichlet"}
SEEDED |= {"native_dropout", "feature_dropout", "fused_dropout", "rrelu_with_noise", "normal_functional"}
"""What every rank draws whole; so it does what a custom op draws that says so (`nondeterministic_seeded`)."""


def draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers and is no dropout or attention, which have local code of their own."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name == "apply_inplace":
        name = str(node.args[0])
    return name.strip("_") in BY_COUNTER | SEEDED or is_random_operator(node.target)


def is_random_operator(target: object) -> bool:
    """Whether an operator is of another library than torch and has the tag that its numbers come from a generator."""
    if isinstance(target, OpOverloadPacket):
        return any(is_random_operator(getattr(target, name)) for name in target.overloads())
    if not isinstance(target, OpOverload) or target.namespace == "aten":
        return False
    return torch.Tag.nondeterministic_seeded in target.tags
