"""Warnings of constraints that can change nothing: they forbid or prefer a layout that no tensor they name can have."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.memory.formulas import StepMemory
from autopar.solver.constraints.pins import Spoken, asked_of_inputs, describe, read_pin, spoken_of
from autopar.solver.constraints.restricted import Strategies
from autopar.user_warnings import AutoparWarning, warn

_FEW = 4  # most layouts that a warning lists


class ConstraintWarning(AutoparWarning):
    """A constraint changes nothing, or saves no memory."""


def warn_of_idle(
    strategies: Strategies, memory: StepMemory, constraints: Sequence[str], axis_names: Sequence[str]
) -> None:
    """Give a ConstraintWarning for each pin of layouts that changes nothing; `strategies`: those before any constraint.

    A pin that demands (=) a layout that no tensor can have is an error, which `restrict` raises. Raises InputError for
    a pin that is malformed or matches nothing.
    """
    for text in constraints:
        pin = read_pin(text.strip())
        if pin is None or pin.kind == "recompute":
            continue
        spoken = spoken_of(memory, pin, axis_names)
        why = _why_free(spoken) if spoken.is_free else _nothing_lies_so(spoken, strategies, memory)
        if why and (spoken.is_free, pin.sign) not in ((True, "!="), (False, "=")):
            warn(f"constraint '{pin.text}' changes nothing: {why}", ConstraintWarning)


def _why_free(spoken: Spoken) -> str:
    asks = spoken.pin.wanted.strip("*, ")
    return "it speaks of axes of one device, which split nothing" if asks else "it leaves every axis free"


def _nothing_lies_so(spoken: Spoken, strategies: Strategies, memory: StepMemory) -> str:
    """A text saying that no tensor named by a pin can have its layout, and which it can have; empty if some can."""
    first, *others = spoken.places
    ways = [(node, strategy) for node in spoken.places for strategy in strategies.get(node, ())]
    if any(spoken.holds(node, strategy) != (spoken.pin.sign == "!=") for node, strategy in ways):
        return ""
    layouts = list(
        dict.fromkeys(str(s) for node, strategy in ways if node is first for s in spoken.layouts(node, strategy))
    )
    further = f" or in {len(layouts) - _FEW} other ways" if len(layouts) > _FEW else ""
    nor = "; nor can any other tensor that it names" if others else ""
    only = f"{' or '.join(layouts[:_FEW])}{further}{asked_of_inputs(first)}"
    return f"{describe(memory, first)} cannot have this layout, only {only}{nor}"
