"""One of two ranks with inputs="local"; in the third step the last has another number of rows than the first."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from call_cases import built, rows
from torch.distributed.device_mesh import init_device_mesh

import autopar

STEPS = 2


def main() -> None:
    """`argv`: how many rows this rank passes in the third step, first rank first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    mesh = init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(built(), {"x": rows(8)}, mesh, constraints="ddp", inputs="local")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    own = int(sys.argv[1 + dist.get_rank()])
    for step in range(STEPS + 1):
        model(rows(own if step == STEPS else 4)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
