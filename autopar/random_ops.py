"""Ops that draw random numbers, by their names; dropout and attention are not among them."""

from __future__ import annotations

from torch import fx

BY_COUNTER = {"rand", "rand_like", "uniform", "bernoulli", "randn", "randn_like", "normal"}
"""Uniform and normal numbers: a rank can draw its own part from a counter over global indices."""

SEEDED = {"randint", "randint_like", "randperm", "multinomial", "poisson", "binomial", "exponential", "geometric"}
SEEDED |= {"log_normal", "cauchy", "random", "rrelu", "gumbel_softmax", "alpha_dropout", "feature_alpha_dropout"}
SEEDED |= {"fractional_max_pool2d", "fractional_max_pool3d"}
"""What every rank draws whole."""


def draws(node: fx.Node) -> bool:
    """Whether an op draws random numbers and is no dropout or attention, which have local code of their own."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name == "apply_inplace":
        name = str(node.args[0])
    return name.strip("_") in BY_COUNTER | SEEDED
