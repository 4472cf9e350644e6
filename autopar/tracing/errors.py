"""What can go wrong while tracing: each error says where in the model and what to do."""

from __future__ import annotations

from autopar.errors import InputError, UntraceableError

OR_LEAF = ", or let the module be a leaf"


def nor_one_op(reason: str, why: str) -> str:
    """Why something has no graph, and why it cannot be one op either: without the advice to let it be a leaf."""
    return f"{reason.replace(OR_LEAF, '').rstrip('.')}. Nor can it run as one op: {why}"


class TraceError(UntraceableError, RuntimeError):
    """The model does something that cannot be put in a graph."""


class DrawError(UntraceableError):
    """Forward draws a number that no graph could draw again."""


class UnknownDataError(TraceError):
    """Python asked for the contents of a tensor that has none while tracing.

    `frames` are the code objects of the functions that asked, innermost first: a library that asked and has a
    data-free path is sent down it when the trace is repeated.
    """

    def __init__(self, message: str, *, where: str = "", frames: tuple[object, ...] = ()) -> None:
        super().__init__(message, where=where)
        self.frames = frames


class NotOneOpError(TraceError):
    """What has no graph cannot be one op either; `reason` is why it has no graph, the fault to mend."""

    def __init__(self, reason: str, message: str, *, where: str = "") -> None:
        super().__init__(nor_one_op(reason, message), where=where)
        self.reason = reason


class UnrolledError(TraceError):
    """A loop makes the graph too long; `kind` is the type of the module whose own forward made most of it."""

    def __init__(self, message: str, kind: type, *, where: str = "") -> None:
        super().__init__(message, where=where)
        self.kind = kind


def met_stand_in(error: Exception) -> UnknownDataError | None:
    """The error of a number that depends on data, where code that takes plain ones alone met it and says so."""
    if "UnknownNumber" not in str(error):
        return None
    return UnknownDataError(
        f"{type(error).__name__}: {error} (which stands for what depends on data): give the inputs that decide a "
        f"known example (autopar.known){OR_LEAF}"
    )


class ArgumentError(InputError, ValueError):
    """An example, a fixed value or an argument of a call does not fit the model's signature or the trace."""
