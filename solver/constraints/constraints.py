"""Constraints of the user as restrictions on strategies: schemes for mesh axes (`solver.constraints.schemes`), and pins
of layouts and recompute by name (`solver.constraints.pins`). `leaf:pattern`, which asks for leaves of the trace, is
handled before, in `autopar.planning.leaf_requests`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.cost.memory.formulas import StepMemory
from autopar.errors import InfeasibleError, InputError
from autopar.solver.constraints.pins import KINDS, hold, is_overruled, is_preference, read_pin
from autopar.solver.constraints.restricted import ExcludedError, Restricted, Strategies
from autopar.solver.constraints.schemes import PRESETS, arrange, is_scheme, scheme_of
from autopar.user_warnings import AutoparWarning, warn

Answer = TypeVar("Answer")


class PreferenceWarning(AutoparWarning):
    """No plan fits with a preferred layout, so the preference was ignored."""


def restrict(
    strategies: Strategies, memory: StepMemory, constraints: Sequence[str], axis_names: Sequence[str]
) -> Restricted:
    """The strategies that schemes and pins leave.

    Raises InputError for a constraint that is malformed or matches nothing, InfeasibleError for one that leaves an op
    no strategy.
    """
    schemes, pins = [], []
    for text in (text.strip() for text in constraints):
        pin = read_pin(text)
        if is_scheme(text):
            schemes.append(text)
        elif pin is not None:
            pins.append(pin)
        else:
            close = _near(text)
            hint = f" Did you mean '{close}'?" if close else ""
            raise InputError(
                f"constraint '{text}' is no preset ({', '.join(PRESETS)}; options in brackets, 'fsdp(zero=2)'), no "
                "role of an axis ('axis:NAME = role') and no pin: write 'kind:pattern = layout', with != to forbid it "
                f"and ~ to prefer it, and a kind of {', '.join(KINDS)}, or 'leaf:pattern' for modules that are one op "
                f"each.{hint}"
            )
    restricted = arrange(Restricted(strategies), memory, scheme_of(schemes, memory.mesh_shape, axis_names))
    for pin in sorted(pins, key=lambda pin: pin.sign == "~"):  # preferences last, among what the other pins leave
        restricted = hold(restricted, memory, pin, axis_names)
    for pin in pins:
        if is_overruled(restricted, memory, pin):
            raise ExcludedError(pin.text, "later constraints ask for other recompute of everything that this one names")
    return restricted


def _near(text: str) -> str:
    """What a malformed constraint may have meant: a preset, or a pin of another kind; empty if nothing is near."""
    kind, colon, rest = text.partition(":")
    names = (*KINDS, "leaf", "axis") if colon else PRESETS
    close = difflib.get_close_matches(kind.lower().replace(" ", ""), names, n=1)
    return f"{close[0]}{colon}{rest}" if close and close[0] != kind else ""


def satisfied(
    constraints: Sequence[str], solve: Callable[[Sequence[str]], Answer], possible: Callable[[Sequence[str]], bool]
) -> Answer:
    """The result of `solve` under the constraints; if no plan fits, preferences are dropped, with a warning.

    `possible`: whether some plan of unlimited memory meets given constraints. Raises InfeasibleError; if no budget has
    a plan, the error names a minimal set of constraints that cannot hold together.
    """
    try:
        return solve(constraints)
    except InfeasibleError as error:
        firm = [text for text in constraints if not is_preference(text)]
        if len(firm) == len(constraints):
            if error.smallest_budget_bytes is not None or not constraints:
                raise
            members = _members(constraints, possible)
            own = _own_error(members, solve) if len(members) < len(constraints) else None
            raise _named(own or error, members) from error
        preferred = ", ".join(f"'{text}'" for text in constraints if is_preference(text))
        result = satisfied(firm, solve, possible)
        warn(f"no plan fits with {preferred}: planned without ({error.message})", PreferenceWarning)
        return result


def _members(constraints: Sequence[str], possible: Callable[[Sequence[str]], bool]) -> list[str]:
    """A minimal set of constraints that cannot hold together (deletion filter: Chinneck 1997)."""
    members = list(constraints)
    for text in constraints:
        others = [other for other in members if other is not text]
        if others and not possible(others):
            members = others
    return members


def _own_error(members: Sequence[str], solve: Callable[[Sequence[str]], Answer]) -> InfeasibleError | None:
    """The error of these constraints alone, which may differ from the first error of all constraints."""
    try:
        solve(members)
    except InfeasibleError as error:
        return error
    return None  # the relaxation had no plan, but the search found one


def _named(error: InfeasibleError, members: Sequence[str]) -> InfeasibleError:
    reason = error.reason if isinstance(error, ExcludedError) else error.message
    if len(members) == 1:
        return InfeasibleError(f"constraint '{members[0]}' cannot hold: {reason}")
    names = ", ".join(f"'{text}'" for text in members[:-1])
    return InfeasibleError(f"constraints {names} and '{members[-1]}' cannot hold together: {reason}")
