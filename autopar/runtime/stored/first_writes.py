"""What a forward writes into parameters before it reads them: done on this rank's shards when a call begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.graph import FIRST_WRITES, Writes, write_into


def writes_of(nodes: Iterable[fx.Node]) -> tuple[tuple[int, Writes], ...]:
    """Of these parameters and buffers, by their places: which are written, and how."""
    return tuple((place, node.meta[FIRST_WRITES]) for place, node in enumerate(nodes) if FIRST_WRITES in node.meta)


def write_first(state: Sequence[torch.Tensor], writes: Iterable[tuple[int, Writes]]) -> None:
    """Write into these of `state`."""
    for place, several in writes:
        tensor = state[place]
        write_into(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, several)
