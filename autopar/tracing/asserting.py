"""Whether Python asks for a truth value only to assert it: such an answer decides no path that a trace could take."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from autopar.tracing import places
from autopar.tracing.patching import attributes_set

_seen: dict[tuple[CodeType, int], bool | None] = {}


def asserted() -> bool | None:
    """What the `assert` statement wants to hear at whose test the user's innermost frame is; None at any other."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not places.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    key = frame.f_code, frame.f_lasti
    if key not in _seen:
        _seen[key] = _wanted(*key)
    return _seen[key]


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """While inside, `torch.distributions` take their parameters as they are: to check them is to assert."""
    distributions = sys.modules.get("torch.distributions.distribution")
    if distributions is None:
        yield
        return
    with attributes_set(distributions.Distribution, _validate_args=False):
        yield


def _wanted(code: CodeType, offset: int) -> bool | None:
    """The truth value with which the instruction there jumps over the raising of an AssertionError."""
    following = [
        i for i in dis.get_instructions(code) if i.offset >= offset and i.opname not in ("TO_BOOL", "NOT_TAKEN")
    ]
    if len(following) < 2:
        return None
    jump, raising = following[:2]
    raises = raising.opname == "LOAD_ASSERTION_ERROR" or "AssertionError" in raising.argrepr
    if not raises or not jump.opname.startswith("POP_JUMP"):
        return None
    return {"TRUE": True, "FALSE": False}.get(jump.opname.rpartition("_")[2])
