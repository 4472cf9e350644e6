"""Traces every architecture of transformers, torchvision and timm at full size on the meta device; one line each.

python scripts/bench/trace_zoo.py                        # everything, takes hours; skips those that --out holds
python scripts/bench/trace_zoo.py causal-lm masked-lm    # these families
python scripts/bench/trace_zoo.py timm --only resnet --out resnets.jsonl
python scripts/bench/trace_zoo.py causal-lm --again failed   # repeats those whose last line has this status
python scripts/bench/trace_zoo.py --again old            # repeats those whose last line is from another tracer version
python scripts/bench/trace_zoo.py --report out/trace_zoo  # only writes .md and .csv of the records in --out

Each line of --out (JSON): family, name, status (whole | leaves | failed | does not run | no inputs | not built), why,
leaves, nodes, CPU seconds, peak resident memory, a digest of the tracer's files and the date. torchvision and timm are
optional; they may be installed without dependencies into a folder on PYTHONPATH (`pip install --no-deps --target`), and
torchvision may be a build for any device.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo_models import architectures, one_of_each_kind
from zoo_report import summary, write_report
from zoo_source import TRACER
from zoo_sweep import parse, parser_of, sweep


def told(record: dict[str, Any], number: int, of: int) -> str:
    """A record as one line of text."""
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
    parser = parser_of(__doc__, Path("out/trace_zoo.jsonl"), batch=2)
    parser.add_argument("--kinds", action="store_true", help="of timm, one architecture of each of its modules")
    parser.add_argument("--eval", action="store_true", help="evaluation mode; the default is training mode")
    given, records = parse(parser)
    if given.report:
        write_report(records, given.report, given.note)
        return

    def names(family: str) -> Sequence[str]:
        return one_of_each_kind() if family == "timm" and given.kinds else architectures(family)

    done = sweep(given, records, "zoo_worker.py", TRACER, {"train": not given.eval}, told, names)
    print(done, *summary(records), sep="\n")


if __name__ == "__main__":
    main()
