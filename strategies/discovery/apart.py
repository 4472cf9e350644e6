"""Runs the search in a child process, so that a kernel that corrupts memory or crashes does no harm to this one.

Not all kernels check their arguments (on CPUs, fused attention reads past the values if they are shorter than the
keys). So the search runs in a forked child, which reports each trial before it starts it. If the child dies, this trial
has failed, and another child continues with the next one.
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
_PATIENCE_SECONDS = 60.0  # without a message, after which a child is killed
_MOST_DEATHS = 10  # children for one search, before it is given up


class Died(Exception):
    """A child process died or hung outside of a trial, or too many children did."""


def search_apart(holds: Try, search: Callable[[Try], Any]) -> Any:
    """The result of `search(holds)`, computed in child processes; it must be a value that JSON can represent.

    Computed in this process if none can be forked, or if autograd does not work in a fork.
    """
    tried: dict[str, bool] = {}
    for _ in range(_MOST_DEATHS):
        pending = ""
        for message in _in_child(lambda tell: _report_search(holds, search, tried, tell)):
            kind, *content = message
            if kind == "trying":
                pending = content[0]
            elif kind == "tried":
                tried[content[0]] = content[1]
            elif kind == "found":
                return content[0]
            elif kind == "raised":
                raise RuntimeError(f"while trying an op on small tensors:\n{content[0]}")
            elif kind == "unfit":
                return search(holds)
        if not pending or pending in tried:
            raise Died("it ended the process in which it was tried")
        tried[pending] = False
    raise Died(f"it ended {_MOST_DEATHS} processes in which it was tried")


def _report_search(holds: Try, search: Callable[[Try], Any], tried: dict[str, bool], tell: Callable[..., None]) -> None:
    """The child's work: it tells which text is tried, whether it holds, and at last what the search found."""

    def trial(text: str) -> bool:
        if text not in tried:
            tell("trying", text)
            tried[text] = holds(text)
            tell("tried", text, tried[text])
        return tried[text]

    try:
        torch.set_num_threads(1)  # a fork does not have the parent's other threads
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:  # autograd refuses to run after a fork if its threads were started before
        tell("unfit")
        return
    try:
        tell("found", search(trial))
    except Exception:
        tell("raised", traceback.format_exc())


def _in_child(work: Callable[[Callable[..., None]], None]) -> Iterator[list[Any]]:
    """The messages of a forked child that runs `work`, until it ends or sends none for `_PATIENCE_SECONDS`; then it is
    killed."""
    if not hasattr(os, "fork"):
        yield ["unfit"]
        return
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks with threads; the child uses none
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
    """Run `work` in the child and exit. It never returns, so that no code of the parent, such as its exit handlers,
    runs in the child."""
    try:
        os.close(reading)
        faulthandler.disable()  # a crash is an expected result, which needs no traceback
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        with os.fdopen(writing, "w", buffering=1) as out:
            work(lambda *message: print(json.dumps(message), file=out, flush=True))
    finally:
        os._exit(0)


def _messages(reading: int) -> Iterator[list[Any]]:
    """The messages in a pipe, one JSON list a line, until it is closed or silent for `_PATIENCE_SECONDS`."""
    buffer, deadline = b"", time.monotonic() + _PATIENCE_SECONDS
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        block = os.read(reading, 1 << 16)
        if not block:
            return
        *lines, buffer = (buffer + block).split(b"\n")
        for line in lines:
            yield json.loads(line)
        deadline = time.monotonic() + _PATIENCE_SECONDS
