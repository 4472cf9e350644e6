"""All-gathers of one call: ahead of use in forward, and again in backward.

A gather is launched while the buckets before it in the order of the pass are in use (`cost.buckets.ahead`). Outside
recomputed segments, gathering again needs saved-tensor hooks: where autograd would save a gathered copy (or a view of
it such as its transpose), the hook saves a reference to the bucket's member instead, and the copy is freed after its
use.

Recomputed blocks that share parameters have a bucket each. A member that a bucket shares with the one gathered before
it is not sent again while it is still there: the replay of one block passes it on to the replay of the next
(`Route.handed_on`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.cost.buckets.ahead import due_ahead
from autopar.graph import storage_of
from autopar.runtime.communication.buckets import Bucket
from autopar.runtime.communication.flights import Flight
from autopar.runtime.communication.route import Route
from autopar.runtime.communication.saved import Gathered, Kept, Saved
from autopar.runtime.communication.unwanted import leave
from autopar.runtime.ranges import named


class _Gather(NamedTuple):
    """A bucket that is gathered, in the form that `cost.buckets.ahead` takes."""

    bucket: Bucket
    gathers: int
    read_bytes: int


class _Arriving(NamedTuple):
    """Members of a bucket on their way: those `handed` on by another bucket, and the others in a flight."""

    members: Sequence[int]
    handed: Mapping[int, torch.Tensor]
    flight: Flight | None

    def finish(self) -> list[torch.Tensor]:
        """The whole members, in the order of `members`; waits for the flight."""
        arrived = iter(self.flight.finish() if self.flight is not None else ())
        return [self.handed[i] if i in self.handed else next(arrived) for i in self.members]


class Gathers:
    """The gathers of one call. `shards`: local tensors of the state by place, detached from autograd."""

    def __init__(self, route: Route, shards: Sequence[torch.Tensor]) -> None:
        self._thread = threading.get_ident()
        self._route, self._shards = route, shards
        self._begun: dict[Bucket, _Arriving] = {}
        self._handed: dict[tuple[int, Bucket], dict[int, torch.Tensor]] = {}  # by pass and next bucket
        self._live: dict[int, Gathered] | None = None
        self._packed: dict[Bucket, dict[int, int]] = {}  # how often autograd saved each member
        self._whole: dict[Bucket, dict[int, torch.Tensor]] = {}  # gathered again, until last read
        self._unread: dict[Bucket, dict[int, int]] = {}  # how many reads of each of these remain
        self._read: dict[Bucket, int] = {}  # the backward pass that has read all of it

    def __del__(self) -> None:
        """End gathers still under way: a pass may end early (gradients of only some parameters, an error)."""
        if dist.is_initialized():
            self._abandon()

    def _abandon(self) -> None:
        leave([gather.flight for gather in self._begun.values() if gather.flight is not None], self._thread)
        self._begun, self._handed = {}, {}

    def gather(self, bucket: Bucket) -> list[torch.Tensor]:
        """All members of the bucket, whole; afterwards the next bucket's gather is under way."""
        whole = self._arrived(bucket, range(len(bucket.places)))
        self.keep_places(bucket, whole, [self._shards[place] for place in bucket.places])
        self._go_ahead(bucket, read=True)
        return whole

    def keep_places(self, bucket: Bucket, members: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Let the hooks recognise members that are copies to be made again, and save references in their place."""
        if self._live is None or not bucket.regathers:
            return
        for member, (tensor, shard) in enumerate(zip(members, shards, strict=True)):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage.cdata != shard.untyped_storage()._cdata:
                self._live[storage.cdata] = Gathered(storage, bucket, member)

    def gathered_again(self, bucket: Bucket, member: int) -> torch.Tensor:
        """A member that backward needs, gathered again and kept until the last op that saved it has read it. Each
        member is freed by itself, as others may be read much later: a tied head is in one bucket with the norm behind
        its embedding."""
        if member not in self._whole.get(bucket, ()):
            packed = self._packed[bucket]
            members = sorted(packed)  # the same order on all ranks
            self._whole[bucket] = dict(zip(members, self._arrived(bucket, members), strict=True))
            self._unread[bucket] = packed.copy()
            self._go_ahead(bucket, read=True)
        gathered, unread = self._whole[bucket], self._unread[bucket]
        whole = gathered[member]
        unread[member] -= 1
        if not unread[member]:
            del gathered[member]
        if not gathered:
            del self._whole[bucket]
            self._read[bucket] = torch._C._current_graph_task_id()
        return whole

    def _arrived(self, bucket: Bucket, members: Sequence[int]) -> list[torch.Tensor]:
        arriving = self._begun.pop(bucket, None) or self._begin(bucket, members)
        self._go_ahead(bucket, read=False)  # when a pass starts: after its first collective, not its last
        whole = arriving.finish()
        self._hand_on(bucket, dict(zip(members, whole, strict=True)))
        return whole

    def _begin(self, bucket: Bucket, members: Sequence[int]) -> _Arriving:
        handed = self._handed.pop((torch._C._current_graph_task_id(), bucket), {})
        handed = self._there(bucket, members) | handed
        travel = [i for i in members if i not in handed]
        if not travel:
            return _Arriving(members, handed, None)
        stages = [bucket.stages[i] for i in travel]
        shards = [self._shards[bucket.places[i]] for i in travel]
        with torch.no_grad(), named(f"gather {bucket.title}"):
            return _Arriving(members, handed, Flight(shards, [stage.forward for stage in stages], stages[0].dtype))

    def _there(self, bucket: Bucket, members: Sequence[int]) -> dict[int, torch.Tensor]:
        """Members that backward has gathered for other buckets and still needs, or has handed on to others: blocks
        share a weight, and some of them are recomputed."""
        this_pass = torch._C._current_graph_task_id()
        if this_pass == -1:
            return {}
        gathered = [*self._whole.items(), *((other, arriving.handed) for other, arriving in self._begun.items())]
        gathered += [(other, whole) for (number, other), whole in self._handed.items() if number == this_pass]
        there = {(other.places[i], other.stages[i]): weight for other, whole in gathered for i, weight in whole.items()}
        keys = ((i, (bucket.places[i], bucket.stages[i])) for i in members)
        return {i: there[key].detach() for i, key in keys if key in there}

    def _hand_on(self, bucket: Bucket, whole: Mapping[int, torch.Tensor]) -> None:
        """Pass members on to a bucket that reads them soon; detached, as tensors of a call get an autograd history."""
        this_pass = torch._C._current_graph_task_id()
        on = self._route.handed_on(self._gather, backward=this_pass != -1).get(bucket, {})
        for member, (after, place) in on.items():
            is_there = place in self._whole.get(after, ()) or after in self._begun  # nobody would take it, or free it
            if member in whole and not is_there:
                self._handed.setdefault((this_pass, after), {})[place] = whole[member].detach()

    def _go_ahead(self, bucket: Bucket, *, read: bool) -> None:
        """Launch later buckets' collectives that are due by now; wait only for those launched at an earlier bucket."""
        backward = torch._C._current_graph_task_id() != -1
        current, behind = self._gather(bucket), self._behind(bucket, backward=backward)
        for (after, *_), collectives in due_ahead(current, behind, self._route.longest, read=read):
            arriving = self._begun.get(after)
            if arriving is not None:
                while arriving.flight is not None and arriving.flight.launched < collectives:
                    arriving.flight.advance()
            else:
                members = (
                    sorted(self._packed[after]) if backward and after in self._packed else range(len(after.places))
                )
                self._begun[after] = self._begin(after, members)

    def _behind(self, bucket: Bucket, *, backward: bool) -> Iterator[_Gather]:
        """The buckets after `bucket` in the order of the pass, up to one that is already gathered. In backward a bucket
        can be read before its turn, as a tied head's is; then those that should have come before it follow."""
        missing = self._route.missing(
            bucket, lambda candidate: self._is_needed(candidate) and candidate not in self._whole
        )
        early = missing if backward else None
        after = early or self._following(bucket, backward=backward)
        while after is not None and after not in self._whole:
            yield self._gather(after)
            after = self._following(after, backward=backward)

    def _following(self, bucket: Bucket, *, backward: bool) -> Bucket | None:
        following = self._route.backward if backward else self._route.forward
        after = following.get(bucket)
        while backward and after is not None and not after.in_segment and not self._is_needed(after):
            after = following.get(after)
        return after

    def _gather(self, bucket: Bucket) -> _Gather:
        read_bytes = self._route.read_bytes.get(bucket)
        if read_bytes is None:
            pairs = zip(bucket.places, bucket.stages, strict=True)
            read_bytes = sum(stage.gathered_bytes(self._shards[place]) for place, stage in pairs)
            self._route.read_bytes[bucket] = read_bytes
        return _Gather(bucket, bucket.gathers, read_bytes)

    def _is_needed(self, bucket: Bucket) -> bool:
        """Whether the running backward pass has not yet read all that was saved of a bucket."""
        return bucket in self._packed and self._read.get(bucket) != torch._C._current_graph_task_id()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For the duration of one forward, save references where autograd would save gathered copies.

        A collective keeps the hooks that were set at its launch alive, and with them this call, until it is waited for.
        """
        self._live = {}
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        except Exception:  # the loop may catch it: then nobody would wait for the gathers
            self._abandon()
            raise
        finally:
            self._live = None

    def _pack(self, tensor: torch.Tensor) -> Kept | Saved:
        storage = storage_of(tensor) if self._live else None
        gathered = None if storage is None or self._live is None else self._live.get(storage)
        if gathered is None:  # detached, or an op that saves its result would be in a cycle, kept without backward
            return Kept(self, tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
        _, bucket, member = gathered
        packed = self._packed.setdefault(bucket, {})
        packed[member] = packed.get(member, 0) + 1
        version = self._shards[bucket.places[member]]._version
        size, offset = tuple(tensor.shape), int(tensor.storage_offset())
        looks = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        return Saved(self, bucket, member, version, size, tensor.stride(), offset, *looks)

    def unpack(self, saved: Kept | Saved) -> torch.Tensor:
        """The saved tensor; where a reference was saved, the view of the copy gathered again."""
        tensor = saved.tensor if isinstance(saved, Kept) else self._shards[saved.bucket.places[saved.member]]
        if tensor._version != saved.version:
            raise RuntimeError(  # as torch does for tensors that no hook packs
                f"{self._named(tensor)} was written in place (by optimizer.step(), say) between forward and backward, "
                "and this backward pass needs its old value: run backward before the write, or call the model again "
                "after it"
            )
        return tensor if isinstance(saved, Kept) else saved.of(self.gathered_again(saved.bucket, saved.member))

    def _named(self, tensor: torch.Tensor) -> str:
        address = tensor.untyped_storage()._cdata
        places = (place for place, shard in enumerate(self._shards) if shard.untyped_storage()._cdata == address)
        place = next(places, None)
        return f"a tensor of shape {tuple(tensor.shape)}" if place is None else f"'{self._route.names[place]}'"


def _unpack(saved: Kept | Saved) -> torch.Tensor:
    return saved.gathers.unpack(saved)
