"""DTensors whose parts are not combined yet (placement `Partial`), as norms and sums over sharded dims are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

_NEUTRAL = {"sum": 0, "product": 1}


def is_partial(value: Any) -> bool:
    """Whether a value is a DTensor with parts that are not combined."""
    return isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)


def has_parts_of_norm(tensor: DTensor) -> bool:
    """Whether parts are combined as those of norms are: torch has a private kind of `Partial` for these."""
    return any(isinstance(placement, Partial) and type(placement) is not Partial for placement in tensor.placements)


def neutral_number(tensor: DTensor) -> int | None:
    """What the part of this rank holds where that of another rank holds the value of all; None: this one holds it, as
    each does where parts are combined by maxima or means."""
    for axis, placement in enumerate(tensor.placements):
        number = _NEUTRAL.get(placement.reduce_op) if isinstance(placement, Partial) else None
        if number is not None and tensor.device_mesh.get_local_rank(axis):
            return number
    return None


def joined_placements(placements: Iterable[Placement]) -> list[Placement]:
    """The placements of a tensor once its parts are combined: its shards as they were."""
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def joined(value: Any) -> Any:
    """`value`; if it is a DTensor of parts, one without history that has them combined, its shards as they were."""
    if not is_partial(value):
        return value
    with torch.no_grad():
        return value.detach().redistribute(placements=joined_placements(value.placements))


def whole(value: Any) -> Any:
    """`value`; if it is a DTensor, the whole of it on every rank, as a plain tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
