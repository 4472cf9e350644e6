"""Examples run as a user runs them: on one process, and under torchrun on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"


def run_example(name: str, folder: Path, *words: str, processes: int = 1) -> dict[str, Any]:
    """What an example reports. It is killed, with all its processes, when it takes too long."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(EXAMPLES / name), "--out", str(folder), *words]
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
