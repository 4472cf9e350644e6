"""What `import autopar` imports: commands that only read a plan, and planning, must start quickly."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAID = "import sys, {what}; print(*sorted(name for name in sys.modules if name.startswith({names})))"


@pytest.mark.parametrize("what", ["autopar", "autopar.cli"])
def test_what_takes_long_to_import_waits_until_it_is_needed(what: str) -> None:
    names = ("torch.distributed.tensor", "torch._dynamo", "sympy", "transformers", "pulp", "highspy", "lightning")
    code = SAID.format(what=what, names=names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


FREED = """
import gc, weakref, torch
from autopar import Cluster, plan
def planned():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    plan(model, {"input": torch.randn(8, 16)}, Cluster.preset("cpu", (2,)))
    return weakref.ref(model)
model = planned()
gc.collect()
print(model() is None)
"""


def test_the_first_model_that_is_planned_is_not_kept_by_what_planning_imports() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
