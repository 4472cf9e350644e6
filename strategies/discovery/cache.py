"""What was discovered before: a file that comes with the package, and one of the user's own.

Both are JSON: op and arguments to the rule, or to the reason why there is none. They save the search, not the check:
a rule that is read here is run before it is used, since the op behind a name may have changed.
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
    """What is known of one call: `rule`, or `why` there is none."""

    rule: str
    why: str


def user_file() -> Path:
    """`AUTOPAR_DISCOVERY_CACHE`, else autopar/discovered.json in the user's cache folder."""
    if given := os.environ.get("AUTOPAR_DISCOVERY_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar" / "discovered.json"


def look_up(key: str) -> Entry | None:
    """What the files say of a call; the user's own comes first."""
    return _read(user_file()).get(key) or shipped().get(key)


def keep(key: str, entry: Entry) -> None:
    """Add a line to the user's file; where it cannot be written, say so once and go on."""
    path = user_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = {**_read(path), key: entry}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as out:
            json.dump(known, out, indent=1, sort_keys=True)
        os.replace(out.name, path)  # at once: another process may be reading it
    except OSError as error:
        warn(f"discovered rules are not kept: {error}")


@cache
def shipped() -> dict[str, Entry]:
    """The lines of the file that comes with the package."""
    return _read(SHIPPED)


def _read(path: Path) -> dict[str, Entry]:
    """A file's lines; {} where there is none, or none that can be read."""
    try:
        found: dict[str, Entry] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warn(f"{path} is left aside: {error}")
        return {}
    return found
