"""Results as one JSON line per run, such that finished runs survive a kill at any time.

Every worker appends to a file of its own; a run is done if any file in the folder holds it. A line is written by one
call and reaches the disk before the next run begins; an incomplete last line is ignored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(folder: Path) -> list[Record]:
    """The records of all workers. Of several with one key, the last counts, in order of file names and lines.

    Raises SystemExit for a damaged line that is not a file's last.
    """
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("runs.*.jsonl")):
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                found[record["key"]] = record
            except (json.JSONDecodeError, KeyError) as error:
                raise SystemExit(f"{path}, line {number}, is damaged: remove it, and its run is made again") from error
    return list(found.values())


def append(folder: Path, worker: int, record: Record) -> None:
    """Append a line to the worker's file, in place of an incomplete last line."""
    path = folder / f"runs.{worker}.jsonl"
    with path.open("ab+") as file:
        file.seek(0)
        kept = file.read().rfind(b"\n") + 1
        file.truncate(kept)
        file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
