"""What a forward writes into parameters before it reads them: done on this rank's shards when a call begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.graph import FIRST_WRITES
from autopar.ops.first_writes import Writes, write_into


@dataclass(frozen=True)
class FirstWrites:
    """Of parameters, by their places among those of a graph: which are written, and how."""

    written: tuple[tuple[int, Writes], ...]
    places: Mapping[str, int]  # of all, by name

    @staticmethod
    def of(nodes: Iterable[fx.Node]) -> FirstWrites:
        """What these parameters and buffers say of themselves."""
        numbered = list(enumerate(nodes))
        written = tuple((place, node.meta[FIRST_WRITES]) for place, node in numbered if FIRST_WRITES in node.meta)
        return FirstWrites(written, {str(node.target): place for place, node in numbered} if written else {})

    def write(self, state: Sequence[torch.Tensor]) -> None:
        """Write into these of `state`. Others are read as they were, in the shards of what is written: where these
        lie otherwise, they are moved, by all ranks alike."""
        # Behind a write into a local tensor, compiled graphs read what the parameter was before: DTensors are written.
        compiled = torch.compiler.is_compiling()
        for place, several in self.written:
            tensor = state[place]

            def beside(name: str, like: torch.Tensor = tensor) -> torch.Tensor:
                other = state[self.places[name]].detach()
                return other if compiled else _as_it_lies(other, like)

            write_into(tensor if compiled else _local(tensor), several, beside)


def _as_it_lies(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return _local(tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
