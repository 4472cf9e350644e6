"""Ranks that are handed different numbers of rows: told at once, though the process groups would wait for minutes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

TOLD = r"the ranks were given inputs of different shapes in one call: rank (\d) has (\d) rows, rank (\d) has (\d)\."


def test_the_rank_whose_rows_changed_tells_and_nobody_waits() -> None:
    rows = 4, 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("uneven_worker.py")), *map(str, rows)]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "WORLD_SIZE": "2"}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        logs = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 1 for rank in ranks), logs
    found = re.search(TOLD, logs[1])
    assert found is not None, logs[1]
    assert [int(n) for n in found.groups()] == [1, 2, 0, 4]
    assert "CollectiveError: rank 0 of 2, after 2 calls of optimizer.step()" in logs[0]
