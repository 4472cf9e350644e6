"""If one rank hangs, the others end with an error that names the rank, step and collective."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 4


@pytest.mark.slow  # a similar wait in test_uneven_calls.py is not slow
def test_the_others_do_not_hang() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hanging_worker.py"))],
            env={**shared, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for number, rank in enumerate(ranks[:3]):
            told, log = rank.communicate(timeout=600)  # torch's own timeout would be 1800 seconds
            assert rank.returncode == 3, log[-3000:]
            pattern = (
                rf"rank {number} of 4, after 2 calls of optimizer\.step\(\): "
                r"(all_reduce|all_gather|reduce_scatter) of \d+ x float64 over ranks \d, \d \(mesh_.*\) did not end"
            )
            assert re.search(pattern, told), told
        assert ranks[3].poll() is None, "it still hangs"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
