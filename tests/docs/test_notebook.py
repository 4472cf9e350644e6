"""The example notebook runs from top to bottom, and its stored outputs are those of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "plan.ipynb"


def _outputs(path: Path) -> list[list[str]]:
    """For each code cell the kinds of its outputs."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    return [sorted({kind for o in cell["outputs"] for kind in o.get("data", {"text": ""})}) for cell in code]


def test_the_notebook_is_committed_with_its_outputs() -> None:
    shown = _outputs(NOTEBOOK)
    assert "text/html" in shown[0]
    assert sum("image/png" in kinds for kinds in shown) == 3
    text = NOTEBOOK.read_text()
    assert str(Path.home()) not in text and "/site-packages" not in text


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", str(NOTEBOOK)]
    quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm looks for notebook widgets
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path), "--output", "run"],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert _outputs(tmp_path / "run.ipynb") == _outputs(NOTEBOOK)
