"""Bytes of buckets in flight in the backward of a plan's regions."""

from __future__ import annotations

from autopar.cost.memory.backward_transfers import GATHER_FIELDS, Phase, backward_transfers, terms_beside_copies
from autopar.cost.memory.planned_bytes import PlannedBytes, Read
from autopar.cost.memory.transfer_bytes import TransferBytes, largest_bucket_bytes


class RegionTransfers:
    """The transfers of each region: of parameters that its ops read in backward, and of gradients that are reduced
    after it."""

    def __init__(self, plan: PlannedBytes) -> None:
        self._plan, self._grouping = plan, plan.grouping
        self._read: list[dict[Read, TransferBytes]] = []
        self._reduced: list[list[TransferBytes]] = []
        for i in range(len(plan.rows)):
            model = plan.model(i)
            shared = model != i and self._grouping.is_alike(model, i)
            alike = shared and plan.form(model) == plan.form(i)  # else the replays of one may read more
            self._read.append(self._read[model] if alike else plan.transfers_in_backward(i))
            self._reduced.append(self._reduced[model] if shared else plan.transfers_of_gradients(i))
        self._in_flight: dict[int, dict[Phase, int]] = {}
        self._sums: dict[tuple[str, int, int | None], int] = {}

    def in_flight(self, i: int) -> dict[Phase, int]:
        """By phase, bytes of buckets in flight in the backward of a region (`cost.memory.backward_transfers`)."""
        if i not in self._in_flight:
            phases = backward_transfers(self._grouping, i, self._plan.divided(i))
            if not self._plan.reduces(i):
                del phases[Phase.REDUCING]
            self._in_flight[i] = {
                phase: sum(self._bucket_bytes(*term) for term in terms_beside_copies(terms))
                for phase, terms in phases.items()
            }
        return self._in_flight[i]

    def landed_bytes(self) -> int:
        """Bytes of the largest reduced bucket at the end of backward."""
        return max((largest_bucket_bytes(transfers, "landed") for transfers in self._reduced), default=0)

    def _bucket_bytes(self, field: str, i: int, there: int | None) -> int:
        """Bytes in a field of `TransferBytes` of region `i`. `there`: a region whose parameters have arrived already;
        those that `i` shares with it do not arrive once more."""
        if there is not None and not self._grouping.share(i, there):
            there = None
        if (field, i, there) not in self._sums:
            transfers = self._reduced[i]
            if field in GATHER_FIELDS:
                others = self._read[there].items() if there is not None else ()
                arrived = {read[:2] for read, transfer in others if transfer.arriving}
                transfers = [transfer for read, transfer in self._read[i].items() if read[:2] not in arrived]
            self._sums[field, i, there] = largest_bucket_bytes(transfers, field)
        return self._sums[field, i, there]
