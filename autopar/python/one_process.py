"""The model's own code as one process runs it, on ranks too.

A planned forward is that of one process with the whole batch: what ranks would exchange in it is there already. So code
that asks is told that it is alone, as losses do that divide by the number of ranks where there are several; and what
exchanges all the same is refused, since a sum over ranks of what each of them has whole would count it once a rank.
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

_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
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
    """Of a thread: how many times over it is inside, and what tells the place of a call there."""

    depth = 0
    where: Callable[[], str] = staticmethod(str)


_HERE = _Here()
_ENTERING = threading.RLock()
_inside = 0  # of all threads: functions of torch are replaced while any of them is


@contextlib.contextmanager
def one_process(where: Callable[[], str] = str) -> Iterator[None]:
    """While inside, this thread finds `torch.distributed` as it is without a process group; `where`: a call's place.

    Raises ExchangeError for what exchanges.
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
    """Functions of torch, their code, and what stands in its place."""
    found = []
    for name in (*_ANSWERS, *_EXCHANGES):
        function = getattr(dist, name, None)
        if isinstance(function, FunctionType):  # which torch versions have is not the same
            code = forwarding(functools.partial(_answer, name, original(function)), function.__code__)
            found.append((function, function.__code__, code))
    return found


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
