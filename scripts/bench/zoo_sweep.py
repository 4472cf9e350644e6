"""A sweep over the zoo: arguments that its benchmarks share, and one record per architecture, appended when made."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from zoo_models import FAMILIES, architectures
from zoo_report import last_records
from zoo_source import source, stamp

from autopar.sizes import parse_bytes

Records = dict[tuple[str, str], dict[str, Any]]
OLD = "old"  # value of --again: records of another version of the source


class Worker:
    """A process that runs `script`; it is replaced if it dies, hangs or grows too large."""

    def __init__(self, script: str, part: str, options: dict[str, Any], wall_seconds: float) -> None:
        self.script, self.part, self.options, self.wall_seconds = script, part, options, wall_seconds
        self.process: subprocess.Popen[str] | None = None
        self.stamp: dict[str, str] = {}  # of the source files that the process has loaded

    def record(self, family: str, name: str) -> dict[str, Any]:
        """The record of one architecture; if the process dies or hangs, the record says so."""
        process = self._running()
        stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
        stdin.write(json.dumps([family, name]) + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], self.wall_seconds)
        line = stdout.readline() if ready else ""
        if line:
            record: dict[str, Any] = json.loads(line) | self.stamp
            if record.get("peak_bytes", 0) > self.options["memory_bytes"] // 2 or "why" in record:
                self.stop()  # running out of time or memory may leave libraries in any state
            return record
        why = f"the process died ({process.poll()})" if ready else f"hung for {self.wall_seconds:g} s"
        self.stop()
        return {"family": family, "name": name, "status": "failed", "why": why, **self.stamp}

    def stop(self) -> None:
        """End the process; the next model starts a new one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.stamp = stamp(self.part)
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(self.script)), json.dumps(self.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},  # configs suffice: no downloads
            )
        return self.process


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def parser_of(description: str | None, out: Path, batch: int) -> argparse.ArgumentParser:
    """A parser with the arguments that all sweeps share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--only", metavar="WORD", help="architectures whose name contains it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth architecture of a family: a sample")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="how many of a family to pass over before it")
    parser.add_argument("--out", type=Path, default=out, help="records, added to what is there")
    parser.add_argument(
        "--again", action="append", default=[], metavar="STATUS", help=f"do these once more; {OLD}: of another tracer"
    )
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--length", type=int, default=512, help="tokens of text, at most what a config allows")
    parser.add_argument("--cpu-seconds", type=float, default=60, help="limit of each step of the work on a model")
    parser.add_argument("--memory", default="8GiB", help="limit of the worker's data")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write the report of --out to PATH, and stop")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the head of the report")
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Records]:
    """The parsed arguments, and the existing records."""
    given = parser.parse_args()
    if wrong := set(given.families) - set(FAMILIES):
        parser.error(f"no family is called {', '.join(sorted(wrong))}; there are {', '.join(FAMILIES)}")
    return given, last_records(given.out)


def sweep(
    given: argparse.Namespace,
    records: Records,
    script: str,
    part: str,
    options: dict[str, Any],
    told: Callable[[dict[str, Any], int, int], str],
    names: Callable[[str], Sequence[str]] = architectures,
) -> str:
    """Let `script` examine all requested architectures that have no record yet; returns a text with their number.

    `part`: the folder of the package on which records depend; they are old if its files have changed.
    """
    shared = {"batch": given.batch, "length": given.length, "cpu_seconds": given.cpu_seconds}
    shared["memory_bytes"] = parse_bytes(given.memory)
    todo, current = [], source(part)

    def is_due(record: dict[str, Any] | None) -> bool:
        if record is None or record["status"] in given.again:
            return True
        return OLD in given.again and record.get("source") != current

    for family in given.families or FAMILIES:
        try:
            found = names(family)[given.first :: given.every]
        except ImportError as error:
            print(f"{family}: left out, {error}", file=sys.stderr)
            continue
        for name in found:
            if (not given.only or given.only in name) and is_due(records.get((family, name))):
                todo.append((family, name))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    worker = Worker(script, part, shared | options, wall_seconds=20 * given.cpu_seconds)
    start = time.perf_counter()
    try:
        with given.out.open("a", buffering=1) as out:
            for number, (family, name) in enumerate(todo, 1):
                record = worker.record(family, name)
                records[family, name] = record
                out.write(json.dumps(record) + "\n")
                print(told(record, number, len(todo)), flush=True)
    finally:
        worker.stop()
    return f"\n{len(todo)} architectures in {time.perf_counter() - start:.0f} s\n"
