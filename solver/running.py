"""A model solved for its seconds, ties for the plainest plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver.model import OBJECTIVE, Model
from autopar.solver.outcome import Outcome
from autopar.solver.search import search

_PLAIN = 1e-5  # what one departure from the plainest plan costs in the program


def run(model: Model, solver: str, time_limit: float, gap: float, *, patience: float | None = None) -> Outcome:
    """Solve for the model's seconds, ties for the plainest plan; the outcome is in seconds."""
    program = model.program
    scale = model.reference() / OBJECTIVE
    prices, plainness = model.seconds.array(len(program.names)), model.plainness()
    program.cost = prices / scale + _PLAIN * plainness
    outcome = search(program, solver, time_limit=time_limit, gap=gap, patience=patience)
    if outcome.status == "infeasible":
        return outcome
    slack = _PLAIN * model.most_departures(plainness)
    whole = program.matrix().whole  # a solver calls 1 what is nearly 1
    values = np.where(whole, np.round(outcome.values), outcome.values)
    seconds = float(prices @ values)
    overlap = model.overlap
    if overlap is not None and prices[overlap.hidden]:  # at its largest, whatever the solver stopped at
        seconds += overlap.unit * float(values[overlap.hidden]) - overlap.seconds(values)
    bound = max(0.0, outcome.bound - slack) * scale
    return replace(outcome, values=values, objective=seconds, bound=min(bound, seconds))
