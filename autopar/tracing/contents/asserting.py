"""Whether Python asks for a truth value only to assert it; the answer then decides no path that a trace could take.

An assertion is an `assert` statement, or a branch that does nothing but raise (`if degenerate.any(): raise
ValueError`), if nothing in the model catches the error. Both are recognised in the bytecode.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType

from autopar.tracing import places
from autopar.tracing.patching import attributes_set
from autopar.tracing.torch_functions.looked_into import CODES

_ATTEMPT = str(Path(__file__).parents[1] / "attempt.py")  # its frames call the model
_seen: dict[tuple[CodeType, int], bool | None] = {}  # results of `_skipping_value`
_caught: dict[tuple[CodeType, int], bool] = {}  # results of `_is_caught`


def asserted() -> bool | None:
    """The truth value for which the assertion that the user's innermost frame evaluates passes; None if it is none."""
    frame = sys._getframe(1)
    running = []
    while frame is not None and frame.f_code.co_filename != _ATTEMPT:
        if places.is_users(frame.f_code.co_filename) or frame.f_code in CODES:
            running.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    if not running:
        return None
    for at in running:
        if at not in _caught:
            _caught[at] = _is_caught(*at)
    if any(_caught[at] for at in running):
        return None
    if running[0] not in _seen:
        _seen[running[0]] = _skipping_value(*running[0])
    return _seen[running[0]]


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """While inside, `torch.distributions` do not validate their parameters, which would be assertions on data."""
    distributions = sys.modules.get("torch.distributions.distribution")
    if distributions is None:
        yield
        return
    with attributes_set(distributions.Distribution, _validate_args=False):
        yield


def _skipping_value(code: CodeType, offset: int) -> bool | None:
    """The truth value with which the jump at this offset skips the raising of an error; None for other code."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    following = [i for i in instructions if i.offset >= offset]
    if len(following) < 2 or not following[0].opname.startswith("POP_JUMP"):
        return None
    jump = following[0]
    jumps_if = {"TRUE": True, "FALSE": False}.get(jump.opname.rpartition("_")[2])
    if jumps_if is None:  # a test for None
        return None
    if _raises(following[1:], past=jump.argval):
        return jumps_if
    at_target = [i for i in instructions if i.offset >= jump.argval]
    return (not jumps_if) if jump.argval > offset and _raises(at_target, past=None) else None


def _is_caught(code: CodeType, offset: int) -> bool:
    """Whether an `except` in the function may swallow an error raised at this offset, rather than raise another one."""
    instructions = list(dis.get_instructions(code))
    if sys.version_info < (3, 11):  # instructions set up handlers; there is no table
        return any(i.opname == "SETUP_FINALLY" for i in instructions)
    waiting, met = [offset], set[int]()
    while waiting:
        at = waiting.pop()
        for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]  # as `dis.dis` shows it
            if entry.start <= at < entry.end and entry.target not in met:
                met.add(entry.target)
                raising = _only_raises([i for i in instructions if i.offset >= entry.target])
                if raising is None:
                    return True
                waiting.append(raising.offset)  # this may be inside another `try`
    return False


def _only_raises(handler: list[dis.Instruction]) -> dis.Instruction | None:
    """The instruction by which a handler raises at its end, as for `finally` or `with`; None if it may not raise."""
    before = ""
    for instruction, after in pairwise(handler):
        if instruction.opname in _RAISING:
            return instruction
        if instruction.opname == "POP_EXCEPT":
            return after if after.opname in _RAISING else None
        if instruction.opname.startswith("POP_JUMP") and before not in (
            "CHECK_EXC_MATCH",
            "WITH_EXCEPT_START",
            "TO_BOOL",
        ):
            return None
        before = instruction.opname
    return handler[-1] if handler[-1].opname in _RAISING else None


def _raises(following: list[dis.Instruction], past: int | None) -> bool:
    """Whether these instructions do nothing but raise an error, apart from making its message.

    Further tests of the same condition, which also jump `past` the raising, are part of it.
    """
    is_done = False  # a statement came before
    for instruction, after in zip(following, [*following[1:], None], strict=True):
        if instruction.opname in ("RAISE_VARARGS", "LOAD_ASSERTION_ERROR"):
            return True
        if instruction.argval == "_assert" and after is not None and after.argval is False:
            return True  # torch._assert(False, ...)
        if instruction.opname.startswith(_STORES) or instruction.opname in _ENDS:
            return False
        is_done = is_done or instruction.opname in _STATEMENTS
        if "JUMP" in instruction.opname and (is_done or past is None or instruction.argval != past):
            return False
    return False


# Names of bytecode instructions.
_RAISING = ("RERAISE", "RAISE_VARARGS")
_SILENT = ("TO_BOOL", "NOT_TAKEN", "NOP", "RESUME", "PRECALL", "PUSH_NULL", "CACHE", "EXTENDED_ARG")  # no effect
_STATEMENTS = ("STORE_FAST", "STORE_DEREF", "POP_TOP")  # end a statement with a local effect at most
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_")  # change something outside
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "FOR_ITER", "BEFORE_WITH")
