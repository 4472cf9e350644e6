"""One of four ranks on a 2x2 mesh; the last one hangs after two steps. The others print their error."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from applying import applied, batch

from autopar.errors import CollectiveError

STEPS = 2


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))  # the groups of the axes must have this timeout too
    model, *_ = applied((2, 2), ("dp", "tp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS + 1):
        if step == STEPS and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            model(**batch(step)).backward()
        except CollectiveError as error:
            print(error, flush=True)
            os._exit(3)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
