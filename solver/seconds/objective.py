"""The objective of a model's program (predicted seconds, with ties broken in favour of the plainest plan), and solving
for it.

Each departure from the plainest plan (`Model.plainness`) has a small cost in the program. It is subtracted from bounds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.model import OBJECTIVE, Model
from autopar.solver.search.search import search
from autopar.solver.search.windows import improved

# In units of the program's objective, which is about 1000 (`OBJECTIVE`):
_PLAIN = 1e-5  # largest cost of one departure from the plainest plan
_ALL_PLAIN = 0.1  # largest cost of all departures that a plan can have: a proof is weaker by as much
_LEAST = 250.0  # assumed least objective of a plan, which is below 1000 if much hides behind compute


def run(
    model: Model,
    solver: str,
    time_limit: float,
    gap: float,
    *,
    patience: float | None = None,
    best: Outcome | None = None,
    first: Array | None = None,
) -> Outcome:
    """Minimise the model's seconds, ties in favour of the plainest plan; the outcome is in seconds. For the other
    arguments see `search`.

    The gap of the search is smaller than `gap` by what the costs of departures may take off the bound.
    """
    price(model)
    nearer = max(gap / 2, gap - _slack(model) / _LEAST)
    outcome = search(
        model.program, solver, time_limit=time_limit, gap=nearer, patience=patience, best=best, first=first
    )
    return in_seconds(model, outcome)


def run_near(model: Model, start: Outcome, solver: str, gap: float, seconds: float) -> Outcome:
    """A better solution near a known one of a priced model, searched for some seconds (`improved`), without a bound."""
    start = replace(start, status="feasible", bound=0.0)
    return in_seconds(model, improved(model.program, solver, gap, start, seconds))


def price(model: Model) -> None:
    """Set the program's objective: the model's seconds, scaled, plus the small costs of departures."""
    prices = model.seconds.array(len(model.program.names))
    plainness = model.plainness()
    model.program.cost = prices / _scale(model) + _plain(model, plainness) * plainness


def in_seconds(model: Model, outcome: Outcome) -> Outcome:
    """A solver's outcome of a priced program, with objective and bound converted to seconds."""
    if not len(outcome.values):
        return outcome
    program, scale = model.program, _scale(model)
    prices = model.seconds.array(len(program.names))
    whole = program.matrix().whole  # solvers accept values that are nearly whole
    values = np.where(whole, np.round(outcome.values), outcome.values)
    seconds = float(prices @ values)
    overlap = model.overlap
    if overlap is not None and prices[overlap.hidden]:  # the most that can be hidden, even if the solver found less
        seconds += overlap.unit * float(values[overlap.hidden]) - overlap.seconds(values)
    bound = max(0.0, outcome.bound - _slack(model)) * scale
    return replace(outcome, values=values, objective=seconds, bound=min(bound, seconds))


def in_program(model: Model, seconds: float) -> float:
    """Seconds in units of a priced program's objective, for a plan without departures."""
    return seconds / _scale(model)


def _slack(model: Model) -> float:
    """The largest cost of departures of any plan, in units of the objective."""
    plainness = model.plainness()
    return _plain(model, plainness) * model.most_departures(plainness)


def _plain(model: Model, plainness: Array) -> float:
    """The cost of one departure, in units of the objective."""
    return min(_PLAIN, _ALL_PLAIN / max(1.0, model.most_departures(plainness)))


def _scale(model: Model) -> float:
    """The seconds of one unit of the program's objective."""
    return model.reference() / OBJECTIVE
