"""One of two ranks with inputs="local" that trains for two steps; then the last rank acts differently."""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from call_cases import built, rows
from torch.distributed.device_mesh import init_device_mesh

import autopar

STEPS = 2


def main() -> None:
    """`argv`: the groups' timeout in seconds, then for each rank its third step: a number of rows, or without a call
    "ends" or "stays" (alive), or "saves" a checkpoint that the other does not save."""
    torch.set_num_threads(1)
    timeout, *third = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout)))
    mesh = init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(built(), {"x": rows(8)}, mesh, constraints="ddp", inputs="local")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    own = third[dist.get_rank()]
    for step in range(STEPS + 1):
        if step == STEPS and own == "ends":
            return
        if step == STEPS and own == "stays":
            time.sleep(1000)  # the test kills it
        if step == STEPS and own == "saves":
            autopar.save_checkpoint(model, optimizer, tempfile.gettempdir(), step=step)
        model(rows(int(own) if step == STEPS else 4)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
