"""A model solved for its seconds, ties for the plainest plan."""

from __future__ import annotations

from dataclasses import replace

from autopar.solver.model import OBJECTIVE, Model
from autopar.solver.program import Outcome
from autopar.solver.search import search

_PLAIN = 1e-5  # what one departure from the plainest plan costs in the program


def run(model: Model, solver: str, time_limit: float, gap: float, *, patience: float | None = None) -> Outcome:
    """Solve for the model's seconds, ties for the plainest plan; the outcome is in seconds."""
    program = model.program
    scale = model.reference() / OBJECTIVE
    program.cost = {v: s / scale for v, s in model.seconds.items()}
    plainness = model.plainness()
    for variable, departures in plainness.items():
        program.pay(variable, _PLAIN * departures)
    outcome = search(program, solver, time_limit=time_limit, gap=gap, patience=patience)
    if outcome.status == "infeasible":
        return outcome
    slack = _PLAIN * model.most_departures(plainness)
    # a solver calls 1 what is nearly 1
    values = [float(round(x)) if whole else x for x, whole in zip(outcome.values, program.whole, strict=True)]
    seconds = sum(s * values[v] for v, s in model.seconds.items())
    overlap = model.overlap
    if overlap is not None and overlap.hidden in model.seconds:  # at its largest, whatever the solver stopped at
        seconds += overlap.unit * values[overlap.hidden] - overlap.seconds(values)
    bound = max(0.0, outcome.bound - slack) * scale
    return replace(outcome, values=values, objective=seconds, bound=min(bound, seconds))
