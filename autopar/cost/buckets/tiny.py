"""Joins tiny buckets of several blocks: biases and norms that are stored whole, so that only their gradients are sent.

Only the optimizer waits for these gradients, so a block's need not be reduced right after its backward. As one bucket
for each block, they would take a latency each, over every axis. Memory is predicted as if they were reduced by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.cost.buckets.size import TINY_PART

if TYPE_CHECKING:
    from autopar.cost.buckets.buckets import Conversion
    from autopar.cost.memory.formulas import StepMemory


def joined(alike: Mapping[tuple[Any, ...], list[Conversion]], memory: StepMemory) -> list[list[Conversion]]:
    """The groups of conversions, with those joined that are tiny, not gathered, outside segments, and in neighbouring
    blocks of one stretch. The keys of `alike` begin with (stretch, block)."""

    def size(members: Iterable[Conversion]) -> int:
        return sum(memory.local_bytes(member.ref, member.wanted) for member in members)

    most_bytes = TINY_PART * memory.bucket_bytes
    groups: list[list[Conversion]] = []
    begun: dict[tuple[Any, ...], list[Conversion]] = {}
    for ((stretch, _), *way), members in alike.items():
        key = (stretch, *way)
        if members[0].forward or members[0].segment >= 0 or size(members) > most_bytes:
            groups.append(members)
        elif key in begun and size(begun[key]) + size(members) <= most_bytes:
            begun[key] += members
        else:
            begun[key] = list(members)
            groups.append(begun[key])
    return groups
