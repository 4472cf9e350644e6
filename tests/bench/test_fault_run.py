"""Ranks killed at random, during steps and checkpoints: a short run of `scripts/bench/fault_run.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "fault_run.py"

CASES = [
    pytest.param(["--ranks=2", "--runs=1", "--kills=2"], 2, id="two ranks"),
    # the third run restarts with half of the ranks after half of the kills
    pytest.param(["--ranks=4", "--only=2", "--kills=4"], 4, id="four ranks, then two"),
]


@pytest.mark.slow  # tests/runtime/test_checkpoint_crashes.py simulates death at every change of the disk
@pytest.mark.parametrize(("words", "kills"), CASES)
def test_nothing_is_lost(words: list[str], kills: int, tmp_path: Path) -> None:
    """The script fails if steps, bits or processes are lost or left over; the test fails too if it killed nothing."""
    command = [sys.executable, str(SCRIPT), *words, "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    logs = [line for log in tmp_path.glob("kept/run-*/log.txt") for line in log.read_text().splitlines()]
    said = "\n".join(line for line in logs if not line.startswith('{"step"'))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}\n{said[-15000:]}"
    total = dict(
        zip(
            *([cell.strip() for cell in line.split("|")] for line in (done.stdout.splitlines()[i] for i in (0, -1))),
            strict=True,
        )
    )
    assert total["kills"] == str(kills)
    assert int(total["in saves"]) >= 1
