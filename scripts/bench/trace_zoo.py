"""Traces every architecture of transformers, torchvision and timm, at full size on the meta device, one line each.

python scripts/bench/trace_zoo.py                        # everything, hours; goes on where it was stopped
python scripts/bench/trace_zoo.py causal-lm masked-lm    # these families
python scripts/bench/trace_zoo.py timm --only resnet --out resnets.jsonl
python scripts/bench/trace_zoo.py causal-lm --again failed   # those whose last line says so, once more
python scripts/bench/trace_zoo.py --report docs/results/trace_zoo   # no tracing: .md and .csv of what --out holds

Each line of --out (JSON): family, name, status (whole | leaves | failed | does not run | no inputs | not built), why,
leaves, nodes, CPU seconds and peak resident memory. torchvision and timm are optional; they may be installed without
dependencies into a folder on PYTHONPATH (`pip install --no-deps --target`), torchvision in a build for any device.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from zoo_models import FAMILIES, architectures, one_of_each_kind
from zoo_report import last_records, summary, write_report

from autopar.sizes import parse_bytes


class Worker:
    """A process that runs `script`; a new one takes its place when it dies, hangs or has grown too large."""

    script = "zoo_worker.py"

    def __init__(self, options: dict[str, Any], wall_seconds: float) -> None:
        self.options, self.wall_seconds = options, wall_seconds
        self.process: subprocess.Popen[str] | None = None

    def record(self, family: str, name: str) -> dict[str, Any]:
        """The record of one architecture, whatever happens to the process."""
        process = self._running()
        stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
        stdin.write(json.dumps([family, name]) + "\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], self.wall_seconds)
        line = stdout.readline() if ready else ""
        if line:
            record: dict[str, Any] = json.loads(line)
            if record.get("peak_bytes", 0) > self.options["memory_bytes"] // 2 or "more than" in record.get("why", ""):
                self.stop()
            return record
        why = f"the process died ({process.poll()})" if ready else f"hung for {self.wall_seconds:g} s"
        self.stop()
        return {"family": family, "name": name, "status": "failed", "why": why}

    def stop(self) -> None:
        """End the process; the next model starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _running(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(self.script)), json.dumps(self.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},  # models are made from configs; nothing is fetched
            )
        return self.process


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def told(record: dict[str, Any], number: int, of: int) -> str:
    """A record as one line for people."""
    parts = [f"[{number}/{of}]", record["family"], record["name"], record["status"]]
    if "nodes" in record:
        parts.append(f"{record['nodes']} nodes")
    if "seconds" in record:
        parts.append(f"{record['seconds']:.2f} s")
    if record.get("peak_bytes"):
        parts.append(f"{record['peak_bytes'] / 2**30:.2f} GiB")
    if record.get("leaves"):
        kinds = collections.Counter(kind for _, kind, _ in record["leaves"])
        parts.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    if record.get("why"):
        parts.append(f"{record['why'][:160]} at {record.get('place', '?')}")
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--only", metavar="WORD", help="architectures whose name contains it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth architecture of a family: a sample")
    parser.add_argument("--kinds", action="store_true", help="of timm, one architecture of each of its modules")
    parser.add_argument("--out", type=Path, default=Path("out/trace_zoo.jsonl"), help="records, added to what is there")
    parser.add_argument("--again", action="append", default=[], metavar="STATUS", help="do these once more")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens of text, at most what a config allows")
    parser.add_argument("--eval", action="store_true", help="evaluation mode; the default is training mode")
    parser.add_argument("--cpu-seconds", type=float, default=60, help="limit of one build and of one trace")
    parser.add_argument("--memory", default="8GiB", help="limit of the worker's data")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write PATH.md and PATH.csv from --out, and stop")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the head of the report")
    given = parser.parse_args()
    if wrong := set(given.families) - set(FAMILIES):
        parser.error(f"no family is called {', '.join(sorted(wrong))}; there are {', '.join(FAMILIES)}")
    records = last_records(given.out)
    if given.report:
        write_report(records, given.report, given.note)
        return
    options = {
        "batch": given.batch,
        "length": given.length,
        "train": not given.eval,
        "cpu_seconds": given.cpu_seconds,
        "memory_bytes": parse_bytes(given.memory),
    }
    todo = []
    for family in given.families or FAMILIES:
        try:
            names = (one_of_each_kind() if family == "timm" and given.kinds else architectures(family))[:: given.every]
        except ImportError as error:
            print(f"{family}: left out, {error}", file=sys.stderr)
            continue
        for name in names:
            old = records.get((family, name))
            if (not given.only or given.only in name) and (old is None or old["status"] in given.again):
                todo.append((family, name))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    worker = Worker(options, wall_seconds=20 * given.cpu_seconds)
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
    print(f"\n{len(todo)} architectures in {time.perf_counter() - start:.0f} s\n", *summary(records), sep="\n")


if __name__ == "__main__":
    main()
