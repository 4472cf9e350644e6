"""The model's own code as one process runs it, on ranks too.

A planned forward is that of one process with the whole batch: what ranks would exchange in it is there already. So code
that asks is told that it is alone, as losses do that divide by the number of ranks where there are several; and what
exchanges all the same is refused, since a sum over ranks of what each of them has whole would count it once a rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch.distributed as dist

from autopar.errors import UntraceableError
from autopar.replaced import original, replaced

_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_EXCHANGES = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]


class ExchangeError(UntraceableError):
    """The model's own code asks for an exchange between ranks."""


@contextlib.contextmanager
def one_process(where: Callable[[], str] = str) -> Iterator[None]:
    """While inside, this thread finds `torch.distributed` as it is without a process group; `where`: a call's place.

    Raises ExchangeError for what exchanges.
    """
    if not dist.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            _replace(stack, name, lambda *_, answer=answer, **__: answer)
        for name in _EXCHANGES:
            _replace(stack, name, lambda *_, name=name, **__: _refuse(name, where()))
        yield


def _replace(stack: contextlib.ExitStack, name: str, own: Callable[..., Any]) -> None:
    function, thread = getattr(dist, name, None), threading.get_ident()
    if not isinstance(function, FunctionType):  # which torch versions have is not the same
        return
    before = original(function)
    stack.enter_context(
        replaced(
            function, lambda *args, **kwargs: (own if threading.get_ident() == thread else before)(*args, **kwargs)
        )
    )


def _refuse(name: str, where: str) -> Any:
    raise ExchangeError(
        f"forward calls torch.distributed.{name}(), and a planned forward is that of one process with the whole batch, "
        "which has nothing to exchange: build the model as for one process (its option for it off, or before "
        "init_process_group), or call it where torch.distributed.is_initialized(), which is False in a planned forward",
        where=where,
    )
