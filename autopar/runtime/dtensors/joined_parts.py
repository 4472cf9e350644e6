"""DTensors whose parts are not combined yet (placement `Partial`), as norms and sums over sharded dims are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement


def is_partial(value: Any) -> bool:
    """Whether a value is a DTensor with parts that are not combined."""
    return isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)


def joined_placements(placements: Iterable[Placement]) -> list[Placement]:
    """The placements of a tensor once its parts are combined: its shards as they were."""
    return [Replicate() if placement.is_partial() else placement for placement in placements]


def joined(value: Any) -> Any:
    """`value`; if it is a DTensor of parts, one without history that has them combined, its shards as they were."""
    if not is_partial(value):
        return value
    with torch.no_grad():
        return value.detach().redistribute(placements=joined_placements(value.placements))
