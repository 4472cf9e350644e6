"""The benchmark of memory per rank while a model is initialised runs, with plausible figures for a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import materialise
import pytest


@pytest.mark.slow
def test_rows_of_a_small_model(tmp_path: Path) -> None:
    script = Path(materialise.__file__)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--model", "5m", "--folder", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *launch, str(script), *options], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["way"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == ["initial values", "written to files", "read from files"]
    for row in rows.values():
        assert row["way"] in done.stdout
        assert row["ranks"] == 2
        assert row["model_bytes"] > 9e6
    # Half of the model, and the largest tensor (a tenth of so small a model) whole beside its shard.
    assert 0.5 < rows["initial values"]["tensor_bytes"] / row["model_bytes"] < 0.65
    assert 0.5 < rows["read from files"]["tensor_bytes"] / row["model_bytes"] < 0.65
