"""One process acts as one of many ranks on torch's fake process group: nothing waits for the other ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar

dist.init_process_group("fake", rank=RANK, world_size=1024, store=FakeStore())
mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
options = {"constraints": "fsdp+tp", "inputs": "local", "loss_fn": lambda output: output.square().mean()}
model = autopar.autoparallelize(model, {"input": torch.zeros(1024, 64)}, mesh, **options)
optimizer = torch.optim.AdamW(model.parameters())
for rows in (8, 8, 16):  # the last is planned when it comes
    model(torch.randn(rows, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
print(tuple(model[0].weight.shape), tuple(model[0].weight.to_local().shape))
"""


@pytest.mark.parametrize("rank", [0, 777])
def test_one_rank_of_1024_trains(rank: int) -> None:
    script = SCRIPT.replace("RANK", str(rank))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(256, 64) (2, 64)\n"
