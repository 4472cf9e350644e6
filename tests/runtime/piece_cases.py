"""Positions of a tensor's shards on real ranks, compared with DTensor's."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autopar.runtime.stored.pieces import cut, ranges_of
from autopar.runtime.weights import gathering


def pieces_of_any_layout() -> list[str]:
    """Shards cut by their positions equal DTensor's, and the whole tensor is gathered from them in any layout; blocks
    of 256 bytes are a row or two."""
    mesh, wrong = init_device_mesh("cpu", (2, 2)), []
    gathering.BLOCK_BYTES = 256
    choices = [Replicate(), *(Shard(dim) for dim in range(3))]
    for shape in ((8, 4, 6), (7, 5, 3), (2, 3, 1), (5,), (1, 9)):
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        for placements in itertools.product(choices, choices):
            if any(isinstance(p, Shard) and p.dim >= len(shape) for p in placements):
                continue
            tensor = distribute_tensor(whole, mesh, placements)
            if not torch.equal(cut(whole, ranges_of(tensor)), tensor.to_local()):
                wrong.append(f"piece of {shape} in {placements}")
            again = gathering.whole_on_rank_zero(tensor)
            if (again is None) != (dist.get_rank() > 0) or (again is not None and not torch.equal(again, whole)):
                wrong.append(f"whole of {shape} in {placements}")
    return wrong


CASES = {4: {"pieces": pieces_of_any_layout}}
