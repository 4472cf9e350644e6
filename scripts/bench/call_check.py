"""Cost per step of the check that all ranks make the same call of a planned model (`ranks.alike`).

    torchrun --standalone --nproc-per-node 2 scripts/bench/call_check.py
    torchrun --standalone --nproc-per-node 4 scripts/bench/call_check.py --pairs 200

A pair is one step of a small GPT-2 with the check and one without (forward, backward, fused AdamW, zero_grad), in
alternating order, between barriers. The table gives the median ratio of the two times in a pair with a 95 % bootstrap
interval, in wall-clock seconds and in CPU seconds of all threads of a rank; and the share of a step inside the check,
timed directly. All figures are means over the ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import autoparallelize
from autopar.report.tables import table
from autopar.runtime.ranks.alike import Alike, CallSize

sys.path.insert(0, str(Path(__file__).parent))
from startup import small_gpt2
from step_time import median_with_interval

CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


class Inside:
    """Counts seconds inside the check; with `off`, the check is skipped."""

    def __init__(self) -> None:
        self.seconds, self.off = 0.0, False
        self._announce = Alike.announce

    def announce(self, alike: Alike, call: CallSize) -> None:
        if not self.off:
            begin = time.perf_counter()
            self._announce(alike, call)
            self.seconds += time.perf_counter() - begin


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    """Seconds of one step, by each of the clocks."""
    dist.barrier()
    begin = [clock() for clock in CLOCKS.values()]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return [clock() - start for clock, start in zip(CLOCKS.values(), begin, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    ids = torch.randint(0, 512, (8 * ranks, 64))
    model = autoparallelize(small_gpt2(), {"input_ids": ids, "labels": ids}, mesh, constraints="ddp")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(5):
        step(model, optimizer, ids)
    inside, found = Inside(), []
    with mock.patch.object(Alike, "announce", lambda *call: inside.announce(*call)):
        for pair in range(options.pairs):
            seconds: dict[bool, list[float]] = {}
            for off in (False, True) if pair % 2 else (True, False):
                inside.off = off
                seconds[off] = step(model, optimizer, ids)
            found.append((seconds[False], seconds[True]))
    walls = [with_it[0] for with_it, _ in found]
    own = torch.tensor([[a / b for a, b in zip(*pair, strict=True)] for pair in found])
    figures = torch.tensor([statistics.median(walls), inside.seconds / options.pairs, inside.seconds / sum(walls)])
    for one in (own, figures):
        dist.all_reduce(one)
        one /= ranks
    if dist.get_rank() == 0:
        rows = []
        for number, clock in enumerate(CLOCKS):
            low, middle, high = median_with_interval(own[:, number].tolist())
            rows.append([f"{clock} with / without", f"{middle:.4f}", f"{low:.4f} to {high:.4f}"])
        rows += [
            ["a step", f"{1e3 * figures[0]:.1f} ms", ""],
            ["inside the comparison", f"{1e6 * figures[1]:.1f} us", f"{100 * figures[2]:.3f} % of a step"],
        ]
        print(*table(rows, "<>>", head=[f"{ranks} ranks", "median", "95 %"], indent=0), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
