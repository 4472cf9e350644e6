"""A training run observed from outside: torchrun, its rank processes and the files they write; and how to kill a rank.

The script that runs does not cooperate: ranks are found (in Linux's /proc) and killed from outside, at any time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "resume.py"
NAP_SECONDS = 0.001  # between polls


class Hangs(Exception):
    """A run made no progress for longer than its timeout."""


class Run:
    """One training run in a folder, which may take several launches, one after the other."""

    def __init__(self, folder: Path, words: Sequence[str], patience_seconds: float) -> None:
        folder.mkdir(parents=True)
        self.folder, self.checkpoints, self.losses = folder, folder / "checkpoints", folder / "losses.jsonl"
        self._words, self._patience_seconds = words, patience_seconds
        self._mark = f"fault-run-{uuid.uuid4()}"  # in the environment of all processes of the run
        self._agent: subprocess.Popen[bytes] | None = None

    def launch(self, ranks: int, restarts: int) -> None:
        """Start torchrun with `ranks` ranks; it restarts them up to `restarts` times."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(SCRIPT), *self._words]
        command += ["--folder", str(self.checkpoints), "--losses", str(self.losses)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FAULT_RUN": self._mark}
        environment["PYTHONFAULTHANDLER"] = "1"  # a crashing rank prints its stack
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
            "1"  # else restarts read stale addresses, see scripts/launch
        )
        with (self.folder / "log.txt").open("ab") as log:
            self._agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def entries(self) -> list[dict[str, Any]]:
        """The lines that rank 0 has written so far: one with `start` for each attempt, and one for each step."""
        lines = self.losses.read_text().split("\n")[:-1] if self.losses.exists() else []
        return [json.loads(line) for line in lines]

    def partial(self) -> Path | None:
        """The incomplete checkpoint, if one is being written or was when the ranks died."""
        return next(self.checkpoints.glob(".step-*.partial"), None)

    def complete(self) -> int:
        """The step of the last complete checkpoint; 0 if there is none."""
        return max((int(found.name[5:13]) for found in self.checkpoints.glob("step-*")), default=0)

    def ranks(self) -> list[int]:
        """Process ids of the ranks that are alive."""
        assert self._agent is not None
        agent = str(self._agent.pid)
        return [pid for pid, stat in _processes() if stat[1] == agent and stat[0] != "Z"]

    def wait(self, until: Callable[[], bool], nap_seconds: float = NAP_SECONDS) -> bool:
        """Whether `until()` became true before torchrun ended; raises Hangs if no losses are written for too long."""
        assert self._agent is not None
        deadline, seen = time.monotonic() + self._patience_seconds, -1
        while not until():
            if self._agent.poll() is not None:
                return until()
            size = self.losses.stat().st_size if self.losses.exists() else 0
            if size != seen:
                deadline, seen = time.monotonic() + self._patience_seconds, size
            if time.monotonic() > deadline:
                raise Hangs
            time.sleep(nap_seconds)
        return True

    def ended(self) -> int:
        """Wait for torchrun to end; returns its exit status."""
        assert self._agent is not None
        self.wait(lambda: False, nap_seconds=0.05)
        return self._agent.wait()

    def orphans(self, patience_seconds: float = 20) -> list[int]:
        """Processes of this run that still exist `patience_seconds` after it has ended."""
        deadline = time.monotonic() + patience_seconds
        while (left := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def end(self) -> None:
        """Kill all remaining processes of the run."""
        for pid in self._marked():
            kill(pid)
        if self._agent is not None:
            self._agent.wait()

    def _marked(self) -> list[int]:
        mark, found = f"FAULT_RUN={self._mark}".encode(), []
        for pid, stat in _processes():
            try:
                if stat[0] != "Z" and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
            except OSError:  # the process has ended, or belongs to another user
                continue
        return found


def kill(pid: int) -> bool:
    """Send SIGKILL; returns whether the process existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _processes() -> Iterator[tuple[int, list[str]]]:
    """For each process, its id and the fields of /proc/ID/stat from the state on: state, parent, ..."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            yield int(entry.name), stat.rpartition(")")[2].split()
