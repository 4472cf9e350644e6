"""What a solver found of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.linear.highs import Basis
from autopar.solver.linear.relaxation import Relaxation
from autopar.solver.linear.terms import Array

Bounds = Mapping[int, tuple[float, float]]  # a box: by variable, bounds narrower than its own
NONE: Array = np.zeros(0)
INTEGRALITY = 1e-6  # integrality tolerance: a value this near to a whole number counts as whole


@dataclass(frozen=True)
class Outcome:
    """The result of an integer program or of a relaxation; `bound` is proven.

    `status`: "optimal", "feasible" (stopped early, with a solution), "stopped" (without one), "infeasible"; of a
    relaxation also "closed" (only a bound is known, which reaches the cutoff). In branch and bound it can be "waiting":
    a box whose relaxation is not solved yet.
    """

    status: str
    values: Array  # empty without a solution
    objective: float
    bound: float
    reduced: Array = field(default_factory=lambda: NONE)  # reduced costs, of a relaxation
    relaxation: Relaxation | None = None  # the HiGHS relaxation that gave this answer, for warm starts
    counts: Bounds = field(default_factory=dict)  # the box of this outcome
    basis: Basis | None = None  # of a relaxation
    duals: Array = field(default_factory=lambda: NONE)  # dual values of its rows
