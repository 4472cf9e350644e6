"""Tiny buckets of several blocks as one: biases and norms that are kept whole, whose gradients alone move.

Nothing waits for these gradients but the optimizer, so that those of a block need not be reduced behind it; as a bucket
of each block they would take a latency each, over every axis. The prediction counts their bytes as if they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.cost.buckets.size import TINY_PART

if TYPE_CHECKING:
    from autopar.cost.buckets.buckets import Conversion
    from autopar.cost.memory.formulas import StepMemory


def joined(alike: Mapping[tuple[Any, ...], list[Conversion]], memory: StepMemory) -> list[list[Conversion]]:
    """The groups of conversions that can move together, by keys that begin with stretch and block; those that are tiny,
    not gathered and outside segments with their like in the next blocks of the stretch."""

    def size(some: Iterable[Conversion]) -> int:
        return sum(memory.local_bytes(one.ref, one.wanted) for one in some)

    most = TINY_PART * memory.bucket_bytes
    found: list[list[Conversion]] = []
    begun: dict[tuple[Any, ...], list[Conversion]] = {}
    for ((stretch, _), *others), members in alike.items():
        key = (stretch, *others)
        if members[0].forward or members[0].segment >= 0 or size(members) > most:
            found.append(members)
        elif key in begun and size(begun[key]) + size(members) <= most:
            begun[key] += members
        else:
            begun[key] = list(members)
            found.append(begun[key])
    return found
