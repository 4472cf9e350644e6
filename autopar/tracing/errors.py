"""Errors of tracing: each says where in the model it happened and what to do."""

from __future__ import annotations

from autopar.errors import InputError, UntraceableError

OR_LEAF = ", or let the module be a leaf"


def nor_one_op(reason: str, why: str) -> str:
    """Why something can neither be traced nor be one op; the advice to make it a leaf is removed from `reason`."""
    return f"{reason.replace(OR_LEAF, '').rstrip('.')}. Nor can it run as one op: {why}"


class TraceError(UntraceableError, RuntimeError):
    """The model does something that cannot be recorded in a graph."""


class DrawError(UntraceableError):
    """Forward draws a random number in a way that a graph could not repeat."""


class UnsetError(UntraceableError):
    """A buffer decides whose value a model on the meta device lacks; a leaf would run with a wrong one."""


class UnknownDataError(TraceError):
    """Python asked for the contents of a tensor that has no data while tracing.

    `frames`: code objects of the functions that asked, innermost first. If a library that asked has a data-free path,
    the trace is repeated with this path taken.
    """

    def __init__(self, message: str, *, where: str = "", frames: tuple[object, ...] = ()) -> None:
        super().__init__(message, where=where)
        self.frames = frames


class NotOneOpError(TraceError):
    """Something can neither be traced nor be one op. `reason` is why it cannot be traced, which is the fault to fix."""

    def __init__(self, reason: str, message: str, *, where: str = "") -> None:
        super().__init__(nor_one_op(reason, message), where=where)
        self.reason = reason


class UnrolledError(TraceError):
    """A loop makes the graph too long; `kind` is the type of the module whose own forward made most of it."""

    def __init__(self, message: str, kind: type, *, where: str = "") -> None:
        super().__init__(message, where=where)
        self.kind = kind


def met_stand_in(error: Exception) -> UnknownDataError | None:
    """The error to report where code that accepts only plain numbers met an `UnknownNumber`; None for other errors."""
    if "UnknownNumber" not in str(error):
        return None
    return UnknownDataError(
        f"{type(error).__name__}: {error} (which stands for what depends on data): give the inputs that decide a "
        f"known example (autopar.known){OR_LEAF}"
    )


class ArgumentError(InputError, ValueError):
    """An example, a fixed value or an argument of a call does not fit the model's signature or the trace."""
