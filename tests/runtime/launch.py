"""Real ranks for tests: one launch runs many cases, and nothing hangs.

Cases are functions `case(mesh_size)` in the worker module; each rank runs all of them in order and reports
one line for each: what it returned, or the error.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any


def launch(
    worker: str,
    ranks: int,
    *,
    backends: str = "gloo",
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 300,
) -> list[dict[str, Any]]:
    """Run `worker` (a file in this folder with a dict CASES) on `ranks` processes; each rank's results by case.

    Where the process group has a backend for the other device (`tests/other_device`), this stands in for the CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            **os.environ,
            **(environment or {}),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "BACKENDS": backends,
            "PYTHONFAULTHANDLER": "1",  # a rank that aborts says where
        }
        processes, logs = [], []
        for rank in range(ranks):
            log = open(f"{folder}/rank{rank}.log", "w+")  # noqa: SIM115
            command = [sys.executable, "-W", "error::UserWarning:autopar", __file__, worker, folder]
            own = {**shared, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            logs.append(log)
        try:
            for process in processes:
                process.wait(timeout_seconds)
        finally:
            for process in processes:
                process.kill()
        results = []
        for rank, log in enumerate(logs):
            log.seek(0)
            text = log.read()
            log.close()
            path = Path(folder, f"rank{rank}.json")
            ended = processes[rank].returncode
            assert Path(folder, f"rank{rank}.done").exists(), f"rank {rank} ended early ({ended}):\n{text[-5000:]}"
            results.append(json.loads(path.read_text()))
        return results


def _main() -> None:
    import importlib.util

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backends = os.environ["BACKENDS"]
    if backends != "gloo":
        sys.path.insert(0, str(Path(__file__).parents[1] / "other_device"))
        from other_device import stand_in_for_the_cpu

        stand_in_for_the_cpu()
    dist.init_process_group(backends, timeout=timedelta(seconds=180))
    file = Path(__file__).with_name(sys.argv[1])
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = worker
    spec.loader.exec_module(worker)
    cases: Mapping[str, Any] = worker.CASES[dist.get_world_size()]
    chosen = os.environ.get("CASES")
    report: dict[str, Any] = {}
    mine = Path(sys.argv[2], f"rank{dist.get_rank()}.json")
    for name, case in cases.items():
        if chosen and name not in chosen.split(","):
            continue
        torch.manual_seed(0)
        try:
            report[name] = {"value": case()}
        except Exception as error:
            report[name] = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        mine.write_text(json.dumps(report))
        dist.barrier()
    mine.with_suffix(".done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
