"""Many collectives in flight at once, as with gathers ahead of use: worker of `test_gathers_under_way`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.communication import collectives


def gathered(value: torch.Tensor, at_once: int, group: str) -> list[torch.Tensor]:
    under_way = [collectives.begin_all_gather(value.repeat(4), 2, group) for _ in range(at_once)]
    return [collectives.wait(whole, "all_gather", group) for whole in under_way]


def wrong(run: Callable[[torch.Tensor, int, str], list[torch.Tensor]], at_once: int, rounds: int) -> int:
    """The number of gathered tensors whose values are not those that the ranks gave."""
    group = init_device_mesh("cpu", (2,)).get_group(0).group_name
    found = 0
    for i in range(rounds):
        for whole in run(torch.tensor(2.0 * i + dist.get_rank(), dtype=torch.float64), at_once, group):
            right = torch.tensor([[2.0 * i], [2.0 * i + 1]], dtype=torch.float64).expand_as(whole)
            found += not torch.equal(whole, right)
    return found


def eager() -> int:
    return wrong(gathered, 32, 600)


def compiled() -> int:
    return wrong(torch.compile(gathered, fullgraph=True), 8, 100)


CASES: dict[int, dict[str, Callable[[], Any]]] = {2: {"eager": eager, "compiled": compiled}}
