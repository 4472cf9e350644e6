"""What a solver found of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.linear.highs import Basis
from autopar.solver.linear.relaxation import Relaxation
from autopar.solver.linear.terms import Array

Bounds = Mapping[int, tuple[float, float]]  # of counts and choices, where they are narrower than their own
NONE: Array = np.zeros(0)
WHOLE = 1e-6  # how far from a whole number a relaxation's value may be that is called one


@dataclass(frozen=True)
class Outcome:
    """What the solver found; `bound` is proven.

    `status`: "optimal", "feasible" (stopped early, with a solution), "stopped" (without one), "infeasible", or of a
    relaxation "closed" (only its bound is known, above a cutoff).
    """

    status: str
    values: Array  # none without a solution
    objective: float
    bound: float
    reduced: Array = field(default_factory=lambda: NONE)  # reduced costs, of a relaxation
    relaxation: Relaxation | None = None  # of which it is the answer, HiGHS alone
    counts: Bounds = field(default_factory=dict)  # where this holds
    basis: Basis | None = None  # of a relaxation
    duals: Array = field(default_factory=lambda: NONE)  # dual values of its rows
