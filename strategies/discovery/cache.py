"""Results of earlier discoveries: a file that comes with the package, and one in the user's cache folder.

Both are JSON and map an op with its arguments to its rule, or to the reason why it has none. They save the search but
not the check: a rule that is read here is tested before it is used, since the op of this name may have changed.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TypedDict

from autopar.user_warnings import warn

SHIPPED = Path(__file__).with_name("discovered.json")


class Entry(TypedDict, total=False):
    """The result for one call: its `rule`, or `why` it has none."""

    rule: str
    why: str


def user_file() -> Path:
    """`AUTOPAR_DISCOVERY_CACHE`, else autopar/discovered.json in the user's cache folder."""
    if path := os.environ.get("AUTOPAR_DISCOVERY_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar" / "discovered.json"


def look_up(key: str) -> Entry | None:
    """The entry for a call, if any; the user's file takes precedence."""
    return _read(user_file()).get(key) or shipped().get(key)


def keep(key: str, entry: Entry) -> None:
    """Add an entry to the user's file; if it cannot be written, warn and go on."""
    path = user_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {**_read(path), key: entry}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as out:
            json.dump(entries, out, indent=1, sort_keys=True)
        os.replace(out.name, path)  # atomic, since another process may be reading the file
    except OSError as error:
        warn(f"discovered rules are not kept: {error}")


@cache
def shipped() -> dict[str, Entry]:
    """The entries of the file that comes with the package."""
    return _read(SHIPPED)


def _read(path: Path) -> dict[str, Entry]:
    """A file's entries; {} if it does not exist or cannot be read."""
    try:
        entries: dict[str, Entry] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn(f"{path} is left aside: {error}")
        return {}
    return entries
