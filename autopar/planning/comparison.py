"""Comparisons with the chosen plan: presets, pins and other budgets, all solved from one preparation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.arguments.checks import texts_of
from autopar.errors import AutoparError, InfeasibleError, InputError, TimeLimitError, budget_bounds
from autopar.planning.stages import Prepared
from autopar.plans import Alternative, Plan, TradeoffPoint
from autopar.sizes import show_bytes
from autopar.user_warnings import warn

_UNBOUNDED_BYTES = 1 << 60  # a budget that never binds


def check_comparison(against: str | Sequence[str] | None, tradeoff: int) -> tuple[str, ...] | None:
    """Check what to compare with, before anything is solved; returns the names as `alternatives` takes them.

    Raises InputError for a name that is no preset, no role of an axis and no pin, and for a trade-off of one point.
    """
    from autopar.solver.constraints.pins import read_pin
    from autopar.solver.constraints.schemes import PRESETS, check_preset, is_preset, is_scheme

    if tradeoff != 0 and (not isinstance(tradeoff, int) or tradeoff < 2):
        raise InputError(f"a trade-off of {tradeoff!r} points is no curve: ask for 2 or more")
    if against is None:
        return None
    names = texts_of("against", against)
    for name in names:
        if is_preset(name):
            check_preset(name)
        elif not is_scheme(name) and read_pin(name.strip()) is None:
            presets = ", ".join(PRESETS)
            raise InputError(
                f"{name!r} is no preset to compare with, and no pin: use {presets}, or 'kind:pattern = layout' as in "
                "'param:*.weight = S0'"
            )
    return names


def alternatives(prepared: Prepared, names: Sequence[str] | None = None) -> Iterator[Alternative]:
    """For each preset or pin, its best plan under the request's budget, or why there is none.

    None stands for all presets that the mesh has axes for. A compared preset replaces the presets and axis roles among
    the request's constraints, and keeps its pins; a compared pin is added to all constraints of the request.

    Raises InputError for a pin that is malformed or matches nothing.
    """
    from autopar.solver.constraints.schemes import PRESETS, AxesError, is_scheme

    pins = tuple(text for text in prepared.request.constraints if not is_scheme(text))
    for name in PRESETS if names is None else names:
        try:
            others = pins if is_scheme(name) else prepared.request.constraints
            yield _alternative(prepared, name, (*others, name))
        except AxesError as error:
            if names is not None:
                yield Alternative(name, fits=False, predicted=None, note=error.message)


def _alternative(prepared: Prepared, name: str, constraints: tuple[str, ...]) -> Alternative:
    """The best plan with these constraints; if none fits the budget, the best one without, and budget bounds."""
    try:
        return _of(name, prepared.solve(constraints=constraints))
    except InputError:
        raise
    except AutoparError as error:
        bounds = budget_bounds(error)
        if bounds["smallest_budget_bytes"] is None:  # excluded by pins, or the time limit was reached
            return Alternative(name, fits=False, predicted=None, note=error.message)
    free = prepared.solve(memory_budget_bytes=_UNBOUNDED_BYTES, constraints=constraints)
    return replace(_of(name, free), fits=False, **bounds)


def tradeoff(prepared: Prepared, points: int) -> Iterator[TradeoffPoint]:
    """The best plans under `points` budgets, from the smallest feasible one to one that no longer binds.

    A budget for which the solver finds no plan, or none within its time limit, is left out with a warning, so that the
    other plans are kept. The smallest budget that the solver finds may exceed what the fastest plan takes; the curve
    then starts at the latter.
    """
    free = prepared.solve(memory_budget_bytes=_UNBOUNDED_BYTES)
    least, most = 1, free.predicted.peak_bytes
    try:
        prepared.solve(memory_budget_bytes=1)
    except InfeasibleError as error:
        if error.smallest_budget_bytes is None:
            raise
        least = min(error.smallest_budget_bytes, most)
    for i in range(points - 1):
        budget = least + (most - least) * i // (points - 1)
        try:
            plan = prepared.solve(memory_budget_bytes=budget)
        except (InfeasibleError, TimeLimitError) as error:
            warn(f"the curve has no plan for a budget of {show_bytes(budget)}: {error.message}")
            continue
        yield _point(budget, plan)
    yield _point(most, free)


def _point(budget_bytes: int, plan: Plan) -> TradeoffPoint:
    p = plan.predicted
    return TradeoffPoint(budget_bytes, p.peak_bytes, p.step_seconds, p.recompute_seconds)


def _of(name: str, plan: Plan) -> Alternative:
    proof = plan.certificate
    return Alternative(
        name,
        fits=True,
        predicted=replace(plan.predicted, moments=()),
        comm_bytes=sum(c.bytes * c.count for c in plan.collectives),
        note="" if proof.status == "optimal" else f"{proof.status}: a plan {100 * proof.gap:.1f} % faster may exist",
    )
