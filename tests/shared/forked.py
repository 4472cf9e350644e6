"""Ranks are forked from a process that has imported what all of them need, so that none imports it again.

In a fresh interpreter importing torch, transformers and autopar takes five CPU seconds, and torchrun two more.
`tests/launch` and `tests/docs/test_readme.py` start ranks by torchrun itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

IMPORTED = [
    "torch.distributed.checkpoint",
    "autopar.runtime.application",
    "autopar.solver",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.t5.modeling_t5",
]
_TORCHRUNS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_OWN = ("RANK", "LOCAL_RANK")


@functools.cache
def context() -> ForkServerContext:
    """The context whose server forks processes; also for process pools."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # read when it is imported
        forkserver.ensure_running()
    return made


@dataclass(frozen=True)
class Started:
    """A rank that may still be running, and the file with its stdout and stderr."""

    process: ForkServerProcess
    log: Path

    def told(self, timeout_seconds: float = 300) -> str:
        """Its output, once it has ended or the time is over."""
        self.process.join(timeout_seconds)
        return self.log.read_text() if self.log.exists() else ""


@contextlib.contextmanager
def started(
    target: Callable[..., None], *args: Any, ranks: int, environment: Mapping[str, str]
) -> Iterator[list[Started]]:
    """Start `ranks` processes that call `target(*args)`, with torchrun's variables and these; killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = dict(zip(_TORCHRUNS, ["127.0.0.1", str(port), str(ranks), str(ranks), "0", "forked"], strict=True))
    shared = {**os.environ, **environment, **shared, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        begun = []
        try:
            for rank in range(ranks):
                log, own = Path(folder, f"rank{rank}.log"), shared | dict.fromkeys(_OWN, str(rank))
                begun.append(Started(context().Process(target=_rank, args=(own, log, target, args)), log))
                begun[-1].process.start()
            yield begun
        finally:
            for one in begun:
                if one.process.is_alive():
                    one.process.kill()
                    one.process.join()


def run_ranks(
    target: Callable[..., None], *args: Any, ranks: int, environment: Mapping[str, str], timeout_seconds: float
) -> None:
    """Call `target(*args)` on `ranks` ranks; if one fails or takes longer, fails with the end of its output."""
    with started(target, *args, ranks=ranks, environment=environment) as begun:
        told = [one.told(timeout_seconds) for one in begun]
        codes = [one.process.exitcode for one in begun]
    for rank, (code, text) in enumerate(zip(codes, told, strict=True)):
        assert code == 0, f"rank {rank} ended early, or after {timeout_seconds} s ({code}):\n{text[-5000:]}"


def run_script(path: Path, *words: str, folder: Path, ranks: int = 1, timeout_seconds: float = 300) -> None:
    """Run a script as `torchrun --nproc-per-node RANKS path words` would in this folder, or as `python path words`."""
    run_ranks(_script, path, words, folder, ranks=ranks, environment={}, timeout_seconds=timeout_seconds)


def script_started(
    path: Path, *words: str, folder: Path, ranks: int
) -> contextlib.AbstractContextManager[list[Started]]:
    """As `run_script`, but returns while the ranks are running."""
    return started(_script, path, words, folder, ranks=ranks, environment={})


def _rank(environment: Mapping[str, str], log: Path, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run one rank, in its own process."""
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    faulthandler.enable()  # shows where a rank aborts
    torch.set_num_threads(1)
    target(*args)


def _script(path: Path, words: tuple[str, ...], folder: Path) -> None:
    if os.environ["WORLD_SIZE"] == "1":
        for name in (*_TORCHRUNS, *_OWN):
            del os.environ[name]
    os.chdir(folder)
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
