"""Stamps records with a digest of the source files and the date, to tell records of different versions apart."""

from __future__ import annotations

import collections
import datetime
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import autopar

_PACKAGE = Path(autopar.__file__).resolve().parent
TRACER, PLANNER = "tracing", "."  # the part of the package, a folder, on which a sweep depends


def source(part: str) -> str:
    """A digest of the current files in one part of the package."""
    digest = hashlib.sha256()
    for path in sorted((_PACKAGE / part).rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE / part).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def stamp(part: str) -> dict[str, str]:
    """The fields of a record that say with which source and when it was made."""
    return {"source": source(part), "date": datetime.date.today().isoformat()}


def told(records: Iterable[Mapping[str, Any]], part: str) -> str:
    """The number of records for each source and date, most frequent first, as text."""
    count = collections.Counter((r.get("source", "unknown"), r.get("date", "unknown")) for r in records)
    parts = [f"{number} of {of} on {day}" for (of, day), number in count.most_common()]
    return f"Records: {', '.join(parts)} (the first digits of a digest of the files of `{Path('autopar', part)}`)."
