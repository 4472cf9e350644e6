"""Which source a record is of: a short digest of its files, and the day. So a table tells rows of two ages apart."""

from __future__ import annotations

import collections
import datetime
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import autopar

_PACKAGE = Path(autopar.__file__).resolve().parent
TRACER, PLANNER = "tracing", "."  # what a sweep depends on: a folder of the package


def source(part: str) -> str:
    """A digest of the files in one part of the package as they are now."""
    digest = hashlib.sha256()
    for path in sorted((_PACKAGE / part).rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE / part).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def stamp(part: str) -> dict[str, str]:
    """What a record says of its own making."""
    return {"source": source(part), "date": datetime.date.today().isoformat()}


def told(records: Iterable[Mapping[str, Any]], part: str) -> str:
    """How many records are of which source and day, the most first."""
    count = collections.Counter((r.get("source", "unknown"), r.get("date", "unknown")) for r in records)
    parts = [f"{number} of {of} on {day}" for (of, day), number in count.most_common()]
    return f"Records: {', '.join(parts)} (the first digits of a digest of the files of `{Path('autopar', part)}`)."
