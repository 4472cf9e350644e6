"""The errors a user can meet: each says where in the model, what is wrong and how to mend it."""

from __future__ import annotations

from typing import TypedDict


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose.

    `where` names the place in the user's model (file and line, or module path) when one is known; it ends the text.
    """

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return f"{self.message} [at {self.where}]" if self.where else self.message


class UntraceableError(AutoparError):
    """The model does something that cannot be put in a graph."""


class InputError(AutoparError):
    """An argument is not what the call, the trace or the plan can take."""


class LayoutError(AutoparError):
    """A tensor of this shape cannot have this layout on the mesh."""


class RuleError(AutoparError):
    """A sharding rule is malformed, or gives wrong results when it is run."""


class InfeasibleError(AutoparError):
    """No plan fits the memory budget or the constraints.

    `smallest_budget_bytes`: the smallest budget for which a plan was found; None if none was found in time. If finding
    the exact minimum takes too long, this is an upper bound: no plan fits less than `budget_lower_bound_bytes`, and
    between the two nothing is known. The bound is proven for the planner's own count of memory, which may exceed what
    a plan really takes. Both are None if no plan meets the constraints.
    """

    def __init__(
        self,
        message: str,
        *,
        smallest_budget_bytes: int | None = None,
        budget_lower_bound_bytes: int | None = None,
        where: str = "",
    ) -> None:
        super().__init__(message, where=where)
        self.smallest_budget_bytes = smallest_budget_bytes
        self.budget_lower_bound_bytes = budget_lower_bound_bytes


class TimeLimitError(AutoparError):
    """The solver found no plan within its time limit; there may be one."""


class BudgetBounds(TypedDict):
    """The budgets that an error names, as fields of a result."""

    smallest_budget_bytes: int | None
    budget_lower_bound_bytes: int | None


def budget_bounds(error: AutoparError) -> BudgetBounds:
    """The budgets that an error names; None for both unless it is an `InfeasibleError`."""
    names = ("smallest_budget_bytes", "budget_lower_bound_bytes")
    smallest, lower = (getattr(error, name, None) for name in names)
    return {"smallest_budget_bytes": smallest, "budget_lower_bound_bytes": lower}


class CollectiveError(AutoparError):
    """A collective failed or timed out: another rank died, hangs or is too slow."""


class CheckpointError(AutoparError):
    """A checkpoint could not be written or read; complete ones on disk are unchanged."""


class PlanMismatchError(AutoparError):
    """A plan does not belong to this model, graph or mesh, or the ranks disagree."""
