"""The chosen plan beside presets and other budgets, all solved from one preparation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.arguments.checks import texts_of
from autopar.errors import AutoparError, InfeasibleError, InputError, TimeLimitError, budget_bounds
from autopar.planning.stages import Prepared
from autopar.plans import Alternative, Plan, TradeoffPoint
from autopar.sizes import show_bytes
from autopar.user_warnings import warn

_UNBOUNDED_BYTES = 1 << 60


def check_asked(against: str | Sequence[str] | None, tradeoff: int) -> tuple[str, ...] | None:
    """The names to compare with, as `alternatives` takes them; before anything is solved.

    Raises InputError for what is neither a preset, a role of an axis nor a pin, and for a trade-off of one point.
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
            known = ", ".join(PRESETS)
            raise InputError(
                f"{name!r} is no preset to compare with, and no pin: use {known}, or 'kind:pattern = layout' as in "
                "'param:*.weight = S0'"
            )
    return names


def alternatives(prepared: Prepared, names: Sequence[str] | None = None) -> Iterator[Alternative]:
    """One preset or pin after the other: its best plan under the request's budget, or why there is none.

    None asks for all presets that the mesh has axes for. The request's pins hold for these too; a preset, or roles of
    axes, among its constraints give way to what is compared with. A pin is added to all that the request asks.

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
    try:
        return _of(name, prepared.solve(constraints=constraints))
    except InputError:
        raise
    except AutoparError as error:
        bounds = budget_bounds(error)
        if bounds["smallest_budget_bytes"] is None:  # the pins exclude it, or the solver's time was over
            return Alternative(name, fits=False, predicted=None, note=error.message)
    free = prepared.solve(memory_budget_bytes=_UNBOUNDED_BYTES, constraints=constraints)
    return replace(_of(name, free), fits=False, **bounds)


def tradeoff(prepared: Prepared, points: int) -> Iterator[TradeoffPoint]:
    """The best plans under `points` budgets, from the smallest that has a plan to the one that binds no more.

    Without those budgets for which the solver finds no plan, or none in its time, with a warning: what was planned
    before is not lost for them. The smallest that it finds may be more than the fastest plan takes: that is then the
    least.
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
            made = prepared.solve(memory_budget_bytes=budget)
        except (InfeasibleError, TimeLimitError) as error:
            warn(f"the curve has no plan for a budget of {show_bytes(budget)}: {error.message}")
            continue
        yield _point(budget, made)
    yield _point(most, free)


def _point(budget_bytes: int, made: Plan) -> TradeoffPoint:
    p = made.predicted
    return TradeoffPoint(budget_bytes, p.peak_bytes, p.step_seconds, p.recompute_seconds)


def _of(name: str, made: Plan) -> Alternative:
    proof = made.certificate
    return Alternative(
        name,
        fits=True,
        predicted=replace(made.predicted, moments=()),
        comm_bytes=sum(c.bytes * c.count for c in made.collectives),
        note="" if proof.status == "optimal" else f"{proof.status}: a plan {100 * proof.gap:.1f} % faster may exist",
    )
