"""Trying ops in a process of its own: what a kernel does to memory when its arguments do not fit stays there.

Kernels check their arguments less than one would hope (on CPUs, fused attention reads past the values if they are
shorter than the keys). So the search runs in a forked child, which says what it is about to try; if the child dies,
that trial has failed, and another child goes on after it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Try = Callable[[str], bool]
_PATIENCE_SECONDS = 60.0  # for one trial
_MOST_DEATHS = 10


class Died(Exception):
    """The op ended too many processes, or one took too long."""


def search_apart(holds: Try, search: Callable[[Try], Any]) -> Any:
    """`search(holds)`, a value that JSON can hold, computed in child processes; `search` asks `holds` about texts.

    Where no process can be forked, or autograd does not work in one, it is computed here.
    """
    known: dict[str, bool] = {}
    for _ in range(_MOST_DEATHS):
        pending = ""
        for message in _in_child(lambda tell: _told(holds, search, known, tell)):
            kind, *rest = message
            if kind == "trying":
                pending = rest[0]
            elif kind == "tried":
                known[rest[0]] = rest[1]
            elif kind == "found":
                return rest[0]
            elif kind == "raised":
                raise RuntimeError(f"while trying an op on small tensors:\n{rest[0]}")
            elif kind == "unfit":
                return search(holds)
        if not pending or pending in known:
            raise Died("it ended the process in which it was tried")
        known[pending] = False
    raise Died(f"it ended {_MOST_DEATHS} processes in which it was tried")


def _told(holds: Try, search: Callable[[Try], Any], known: dict[str, bool], tell: Callable[..., None]) -> None:
    """The child's work: what is tried, how it ended, and what was found."""

    def one(text: str) -> bool:
        if text not in known:
            tell("trying", text)
            known[text] = holds(text)
            tell("tried", text, known[text])
        return known[text]

    try:
        torch.set_num_threads(1)  # the parent's other threads are not here
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:  # autograd's threads were started before the fork
        tell("unfit")
        return
    try:
        tell("found", search(one))
    except Exception:
        tell("raised", traceback.format_exc())


def _in_child(work: Callable[[Callable[..., None]], None]) -> Iterator[list[Any]]:
    """What a forked child that does `work` tells, until it ends; it is ended when it is silent for too long."""
    if not hasattr(os, "fork"):
        yield ["unfit"]
        return
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: the child uses none of them
        child = os.fork()
    if child == 0:
        _be_child(work, reading, writing)
    os.close(writing)
    try:
        yield from _messages(reading)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_child(work: Callable[[Callable[..., None]], None], reading: int, writing: int) -> None:
    """Never returns: nothing of the parent's is to run here, its exit handlers included."""
    try:
        os.close(reading)
        faulthandler.disable()  # a crash here is an answer, and nobody's to read
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        with os.fdopen(writing, "w", buffering=1) as out:
            work(lambda *message: print(json.dumps(message), file=out, flush=True))
    finally:
        os._exit(0)


def _messages(reading: int) -> Iterator[list[Any]]:
    rest, deadline = b"", time.monotonic() + _PATIENCE_SECONDS
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        block = os.read(reading, 1 << 16)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield json.loads(line)
        deadline = time.monotonic() + _PATIENCE_SECONDS
