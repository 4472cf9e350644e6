"""Runs examples as a user does, on one process and on two; forked processes, which saves each the imports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forked import run_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"


def run_alone(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The report of each example on one process, by name."""
    return {name: run_example(name, folder / name) for name in names}


def run_example(name: str, folder: Path, *words: str, processes: int = 1) -> dict[str, Any]:
    """An example's report. It is killed with all its processes if it takes too long."""
    return _reported(EXAMPLES / name, folder, "result.json", "--out", str(folder), *words, processes=processes)


def run_cases(name: str, folder: Path, *words: Path, processes: int = 1) -> dict[str, Any]:
    """The results of the cases of a file in this folder."""
    cases = Path(__file__).with_name(name)
    return _reported(cases, folder, "cases.json", str(folder), *map(str, words), processes=processes)


def _reported(path: Path, folder: Path, file: str, *words: str, processes: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    run_script(path, *words, folder=folder, ranks=processes, timeout_seconds=600)
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found
