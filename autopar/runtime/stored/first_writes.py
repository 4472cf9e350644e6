"""Writes of a forward into parameters before it reads them: done on this rank's shards when a call begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.graph import FIRST_WRITES
from autopar.ops.first_writes import Writes, write_into


@dataclass(frozen=True)
class FirstWrites:
    """Which tensors of a graph's state are written, by place, and how."""

    written: tuple[tuple[int, Writes], ...]
    places: Mapping[str, int]  # of all tensors of the state, by name

    @staticmethod
    def of(nodes: Iterable[fx.Node]) -> FirstWrites:
        """The writes noted on the nodes of parameters and buffers."""
        numbered = list(enumerate(nodes))
        written = tuple((place, node.meta[FIRST_WRITES]) for place, node in numbered if FIRST_WRITES in node.meta)
        return FirstWrites(written, {str(node.target): place for place, node in numbered} if written else {})

    def write(self, state: Sequence[torch.Tensor], model: nn.Module) -> None:
        """Make the writes into tensors of `state`. Other tensors that they read have the values from before, in the
        layout of the written one; if theirs is another, all ranks redistribute them. Buffers that only writes read are
        no part of the state, but `model` has them."""
        # After a write into a local tensor, a compiled graph would read the parameter's old value: write the DTensor.
        compiled = torch.compiler.is_compiling()
        for place, several in self.written:
            tensor = state[place]

            def value_of(name: str, like: torch.Tensor = tensor) -> torch.Tensor:
                other = state[self.places[name]] if name in self.places else model.get_buffer(name)
                other = _replicated(other.detach(), like)
                return other if compiled else _as_it_lies(other, like)

            write_into(tensor if compiled else _local(tensor), several, value_of)


def _replicated(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A buffer, which each rank has whole, as a DTensor beside one."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _as_it_lies(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return _local(tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
