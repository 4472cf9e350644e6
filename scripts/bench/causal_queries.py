"""Causal attention with queries sharded over ranks: each rank's CPU time relative to its share of the whole op.

    torchrun --standalone --nproc-per-node 4 scripts/bench/causal_queries.py
    torchrun --standalone --nproc-per-node 2 scripts/bench/causal_queries.py --lengths 1024 4096 16384

Forward and backward of `F.scaled_dot_product_attention(is_causal=True)` with sharded queries and replicated keys and
values, in two ways: with halves of queries swapped between ranks (`autopar.runtime.local.causal`), and with a mask of
queries by keys. Each round runs both ways and the whole op in one process. A rank's CPU seconds are divided by its
share (1 / ranks) of the whole op's in the same round. The table gives the medians over rounds for the rank with the
least work and for that with the most, for which a step waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from side_by_side import keep_freed_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autopar.layout import Layout, take_shard
from autopar.report.tables import table
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local import LocalContext, run_local

HEADS, SIZE = 4, 64
WAYS = {"halves swapped": "sdpa_causal", "under a mask": "sdpa_causal_mask"}
Tensors = list[torch.Tensor]


def seconds_of(run: Callable[..., torch.Tensor], tensors: Tensors) -> float:
    """CPU seconds of forward and backward."""
    dist.barrier()
    begin = time.process_time()
    result = run(*tensors)
    result.backward(torch.ones_like(result))
    taken = time.process_time() - begin
    for tensor in tensors:
        tensor.grad = None
    return taken


def of_parts(local: str, mesh: LocalMesh, length: int) -> Callable[..., torch.Tensor]:
    """This rank's part of the op, run by the local code named `local`."""
    ranks = mesh.shape[0]
    layouts = Layout.parse("S2"), Layout.parse("R"), Layout.parse("R")
    shape = (1, HEADS, length, SIZE)
    context = LocalContext(mesh, layouts, layouts[:1], (shape,) * 3, (shape,), 0)
    assert not length % (2 * ranks)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run_local(
            local, F.scaled_dot_product_attention, tuple(tensors), {"is_causal": True}, context
        )
        return found

    return run


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = LocalMesh.of(init_device_mesh("cpu", (ranks,)))
    rows = []
    for length in options.lengths:
        torch.manual_seed(0)
        tensors = [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]
        query = take_shard(tensors[0], Layout.parse("S2"), (ranks,), mesh.coordinate)
        own = [tensor.clone().requires_grad_() for tensor in (query, *tensors[1:])]
        all_of_it = [tensor.clone().requires_grad_() for tensor in tensors]
        ways = {way: of_parts(local, mesh, length) for way, local in WAYS.items()}
        found: dict[str, list[float]] = {way: [] for way in ways}
        for round_number in range(options.rounds + 1):
            share = seconds_of(whole, all_of_it) / ranks
            for way, run in ways.items():
                taken = seconds_of(run, own)
                if round_number:  # the first round is a warm-up
                    found[way].append(taken / share)
        mine = torch.tensor([statistics.median(found[way]) for way in ways])
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for way, low, high in zip(ways, least.tolist(), most.tolist(), strict=True):
            rows.append((str(length), way, f"{low:.2f}", f"{high:.2f}"))
    if dist.get_rank() == 0:
        print(f"{ranks} ranks, {HEADS} heads of {SIZE}, torch {torch.__version__}; CPU seconds in units of a share")
        print(*table(rows, "><>>", head=("positions", "way", "least", "most")), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
