"""A shortened demo plans, trains on several processes and on one, and passes its own checks (exit code 0)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_demo_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo.py", "--steps", "15", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for words in ("Plain data parallelism would take", "it is refused: no plan fits", "tokens/s", "The loss fell by"):
        assert words in done.stdout
    planned = json.loads((tmp_path / "planned.json").read_text())
    budget = json.loads((tmp_path / "plan.json").read_text())["memory_budget_bytes"]
    assert planned["peak_bytes"] <= budget
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
