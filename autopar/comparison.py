"""The chosen plan beside what an expert would write by hand: the presets, solved from the same preparation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import AutoparError, InfeasibleError, InputError
from autopar.planning import Prepared
from autopar.plans import Alternative, Plan

_UNBOUNDED_BYTES = 1 << 60


def alternatives(prepared: Prepared, names: Sequence[str]) -> Iterator[Alternative]:
    """One preset after the other: its best plan under the request's budget, or why there is none.

    The request's pins hold for the presets too; a preset among its constraints gives way to the one compared with.
    """
    from autopar.solver.constraints import PRESETS

    unknown = [name for name in names if name not in PRESETS]
    if unknown:
        raise InputError(f"{unknown[0]!r} is no preset to compare with: use {', '.join(PRESETS)}")
    pins = tuple(text for text in prepared.request.constraints if text.strip() not in PRESETS)
    for name in names:
        yield _alternative(prepared, name, (*pins, name))


def _alternative(prepared: Prepared, name: str, constraints: Sequence[str]) -> Alternative:
    budget = prepared.request.memory_budget_bytes
    try:
        return _of(name, prepared.solve(memory_budget_bytes=budget, constraints=constraints))
    except AutoparError as error:
        smallest = error.smallest_budget_bytes if isinstance(error, InfeasibleError) else None
        if smallest is None:  # it needs another mesh, the pins exclude it, or the solver's time was over
            return Alternative(name, fits=False, predicted=None, note=error.message)
    free = prepared.solve(memory_budget_bytes=_UNBOUNDED_BYTES, constraints=constraints)
    return replace(_of(name, free), fits=False, smallest_budget_bytes=smallest)


def _of(name: str, made: Plan) -> Alternative:
    proof = made.certificate
    return Alternative(
        name,
        fits=True,
        predicted=replace(made.predicted, moments=()),
        comm_bytes=sum(c.bytes * c.count for c in made.collectives),
        note="" if proof.status == "optimal" else f"{proof.status}: a plan {100 * proof.gap:.1f} % faster may exist",
    )
