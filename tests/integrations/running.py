"""Examples run as a user runs them: on one process, and under torchrun on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"


def run_alone(names: Iterable[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What each of the examples reports on one process, by name: one after another in the same interpreter."""
    results = {name: folder / name / "result.json" for name in names}
    calls = "".join(f"run({name!r}, {str(results[name].parent)!r})\n" for name in results)
    _run([sys.executable, "-c", _ALONE + calls], folder)
    return {name: json.loads(path.read_text()) for name, path in results.items()}


_ALONE = f"""
import runpy, sys
def run(name, folder):
    sys.argv = [name, "--out", folder]
    runpy.run_path(f"{EXAMPLES}/{{name}}", run_name="__main__")
"""


def run_example(name: str, folder: Path, *words: str, processes: int = 1) -> dict[str, Any]:
    """What an example reports. It is killed, with all its processes, when it takes too long."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(EXAMPLES / name), "--out", str(folder), *words]
    _run(command, folder)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def run_cases(name: str, folder: Path, *words: Path, processes: int = 1) -> dict[str, Any]:
    """What the cases of a file in this folder found."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    cases = [str(Path(__file__).with_name(name)), str(folder), *map(str, words)]
    _run([sys.executable, *(launch if processes > 1 else []), *cases], folder)
    found: dict[str, Any] = json.loads((folder / "cases.json").read_text())
    return found


def _run(command: list[str], folder: Path) -> None:
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
