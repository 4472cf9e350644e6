"""Runs the model's own code as in a single process, on all ranks.

A planned forward is that of one process with the whole batch: it has nothing to exchange with other ranks. So code that
asks `torch.distributed` is told that there is no process group (some losses would divide by the number of ranks), and a
collective call is refused: a sum over ranks of a value that each has whole would count it once per rank.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch.distributed as dist

from autopar.errors import UntraceableError
from autopar.python.replaced import forwarding, original

_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}  # without a process group
_EXCHANGES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "scatter", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"),
    *("barrier", "monitored_barrier"),
)


class ExchangeError(UntraceableError):
    """The model's own code asks for an exchange between ranks."""


class _Here(threading.local):
    """Per thread: the nesting depth of `one_process`, and the function that tells the place of a call for errors."""

    depth = 0
    where: Callable[[], str] = staticmethod(str)


_HERE = _Here()
_ENTERING = threading.RLock()
_inside = 0  # threads inside: torch's functions are replaced while it is not 0


@contextlib.contextmanager
def one_process(where: Callable[[], str] = str) -> Iterator[None]:
    """While inside, this thread sees `torch.distributed` as without a process group. `where`: tells a call's place.

    Raises ExchangeError for a collective or a message between ranks.
    """
    global _inside
    codes = _codes() if dist.is_available() else []
    before = _HERE.where
    with _ENTERING:
        _inside += 1
        for function, _, alone in codes if _inside == 1 else ():
            function.__code__ = alone
    _HERE.depth, _HERE.where = _HERE.depth + 1, where
    try:
        yield
    finally:
        _HERE.depth, _HERE.where = _HERE.depth - 1, before
        with _ENTERING:
            _inside -= 1
            for function, own, _ in codes if _inside == 0 else ():
                function.__code__ = own


@functools.cache
def _codes() -> list[tuple[FunctionType, CodeType, CodeType]]:
    """The functions of torch to replace, each with its code object and the replacement."""
    codes = []
    for name in (*_ANSWERS, *_EXCHANGES):
        function = getattr(dist, name, None)
        if isinstance(function, FunctionType):  # not every version of torch has it
            code = forwarding(functools.partial(_answer, name, original(function)), function.__code__)
            codes.append((function, function.__code__, code))
    return codes


def _answer(name: str, before: FunctionType, *args: Any, **kwargs: Any) -> Any:
    if not _HERE.depth:
        return before(*args, **kwargs)
    return _ANSWERS[name] if name in _ANSWERS else _refuse(name, _HERE.where())


def _refuse(name: str, where: str) -> Any:
    raise ExchangeError(
        f"forward calls torch.distributed.{name}(), but a planned forward is that of one process with the whole batch, "
        "which has nothing to exchange: build the model for one process (turn the option off, or build it before "
        "init_process_group), or guard the call by torch.distributed.is_initialized(), False in a planned forward",
        where=where,
    )
