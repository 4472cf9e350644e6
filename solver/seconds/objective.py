"""The objective of a model's program: predicted seconds, with ties broken for the plainest plan; and solving for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.model import OBJECTIVE, Model
from autopar.solver.search.search import search
from autopar.solver.search.windows import improved

_PLAIN = 1e-5  # what one departure from the plainest plan costs in the program, at most
_ALL_PLAIN = 0.1  # and what all that a plan can have cost, at most: a proof lacks so much of the objective
_LEAST = 250.0  # of the objective of a plan: about 1000, or less where much hides behind compute


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
    """Solve for the model's seconds, ties for the plainest plan; the outcome is in seconds. More: `search`.

    What is searched to is nearer than `gap` by what ties may have added to the bound.
    """
    price(model)
    nearer = max(gap / 2, gap - _slack(model) / _LEAST)
    outcome = search(
        model.program, solver, time_limit=time_limit, gap=nearer, patience=patience, best=best, first=first
    )
    return in_seconds(model, outcome)


def run_near(model: Model, known: Outcome, solver: str, gap: float, seconds: float) -> Outcome:
    """The best solution of a priced model that some seconds find near one (`improved`), without a bound."""
    known = replace(known, status="feasible", bound=0.0)
    return in_seconds(model, improved(model.program, solver, gap, known, seconds))


def price(model: Model) -> None:
    """Give the program its objective: the model's seconds, scaled, and a little for what is not plain."""
    prices = model.seconds.array(len(model.program.names))
    plainness = model.plainness()
    model.program.cost = prices / _scale(model) + _plain(model, plainness) * plainness


def in_seconds(model: Model, outcome: Outcome) -> Outcome:
    """What a solver found of a priced program, its objective and bound in seconds."""
    if not len(outcome.values):
        return outcome
    program, scale = model.program, _scale(model)
    prices = model.seconds.array(len(program.names))
    whole = program.matrix().whole  # a solver calls 1 what is nearly 1
    values = np.where(whole, np.round(outcome.values), outcome.values)
    seconds = float(prices @ values)
    overlap = model.overlap
    if overlap is not None and prices[overlap.hidden]:  # at its largest, whatever the solver stopped at
        seconds += overlap.unit * float(values[overlap.hidden]) - overlap.seconds(values)
    bound = max(0.0, outcome.bound - _slack(model)) * scale
    return replace(outcome, values=values, objective=seconds, bound=min(bound, seconds))


def in_program(model: Model, seconds: float) -> float:
    """Seconds as the objective of a priced program has them, for a plain plan."""
    return seconds / _scale(model)


def _slack(model: Model) -> float:
    """The most that a plan pays in the program for not being plain."""
    plainness = model.plainness()
    return _plain(model, plainness) * model.most_departures(plainness)


def _plain(model: Model, plainness: Array) -> float:
    """What one departure costs."""
    return min(_PLAIN, _ALL_PLAIN / max(1.0, model.most_departures(plainness)))


def _scale(model: Model) -> float:
    """Seconds of one unit of the program's objective."""
    return model.reference() / OBJECTIVE
