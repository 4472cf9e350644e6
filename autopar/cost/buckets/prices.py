"""Prices of a bucket's collectives, divided among its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.buckets.buckets import Conversion
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.buckets.latency import BucketLatency, Phase
from autopar.cost.collectives import copies_seconds, least_latency, member_seconds
from autopar.graph import tensor_of

if TYPE_CHECKING:
    from autopar.cost.memory.planned_bytes import PlannedBytes


class Priced(NamedTuple):
    """One collective: its kind, mesh axis and bytes; for each member the seconds that it is charged, and its
    stretch."""

    kind: str
    axis: int
    bytes: int
    members: Sequence[tuple[float, int]]


class BucketPrices:
    """Prices buckets; those of equal blocks, which `plan` knows, only once. `dtypes`: in which gradients are summed."""

    def __init__(
        self,
        cluster: Cluster,
        grouping: Grouping,
        dtypes: Mapping[fx.Node, torch.dtype],
        plan: PlannedBytes | None,
        latency: BucketLatency,
    ) -> None:
        self.cluster, self.grouping, self.dtypes, self.plan = cluster, grouping, dtypes, plan
        self.latency = latency
        self._told: dict[tuple[object, ...], list[Priced]] = {}

    def of(self, members: Sequence[Conversion], phase: Phase) -> list[Priced]:
        """The priced collectives of a bucket, one for each move of its members."""
        nodes = [self.plan.stands_for(member.ref.node) if self.plan else member.ref.node for member in members]
        layouts = [(member.wanted, member.segment >= 0) for member in members]
        alike = (phase, *zip(nodes, layouts, strict=True))
        if alike not in self._told:
            self._told[alike] = self._priced(members, phase)
        return self._told[alike]

    def _priced(self, members: Sequence[Conversion], phase: Phase) -> list[Priced]:
        """A member's price: its part of the collective, of the latency that is missing, and its copies."""
        priced = []
        missing = [self.latency.missing(member, phase) for member in members]
        moves_of = [member.backward if phase == "reductions" else member.forward for member in members]
        for moves in zip(*moves_of, strict=True):
            kind, axis = moves[0].kind, self.cluster.axes[moves[0].axis]
            latency = least_latency(kind, axis)
            sizes, prices = [], []
            for move, member, missing_part in zip(moves, members, missing, strict=True):
                size = move.elements * self._dtype(member, phase).itemsize
                calls = self.grouping.calls(member.ref, member.wanted)
                seconds = member_seconds(kind, size, calls, axis) + missing_part * latency
                seconds += copies_seconds(kind, size, axis, self.cluster.device)
                sizes.append(size)
                prices.append((seconds, self.grouping.stretch(member.ref.node)))
            priced.append(Priced(kind, moves[0].axis, sum(sizes), prices))
        return priced

    def _dtype(self, member: Conversion, phase: Phase) -> torch.dtype:
        return self.dtypes[member.ref.node] if phase == "reductions" else tensor_of(member.ref).dtype
