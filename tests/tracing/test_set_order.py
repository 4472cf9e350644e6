"""A forward that iterates over a set gives the same graph in every process, whatever Python's hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GOES_OVER_A_SET = """
import torch
from torch import nn

from autopar.fingerprints.fingerprint import fingerprint
from autopar.tracing import trace


class Model(nn.Module):
    def forward(self, x):
        kinds, parts = set(["sliding", "full", "chunked", "linear", "mamba"]), {}
        assert isinstance({"a"}, set) and isinstance(kinds, set) and len(kinds) == 5
        for kind in kinds:
            parts[kind] = x * len(kind) + ord(kind[0])
        return sum(parts[kind] for kind in ("full", "mamba"))


print(fingerprint(trace(Model(), {"x": torch.ones(3)}).graph))
assert "set" not in globals()
"""


@pytest.mark.parametrize("program", [GOES_OVER_A_SET], ids=["own"])
def test_every_process_traces_the_same_graph(program: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    found = {
        subprocess.run(
            [sys.executable, str(file)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
