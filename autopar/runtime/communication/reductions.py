"""Gradient reductions of one call, in the background of the backward pass.

A reduction is launched when the gradients of a bucket are available, and waited for by the parameters' autograd nodes.
These were created before all other nodes of the call, so autograd runs them after all others that are ready (nodes of
parameters that are in no bucket run first). Some reductions are waited for earlier, because of the memory that they
hold (`cost.buckets.reductions`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.cost.buckets.reductions import due
from autopar.runtime.communication.buckets import Bucket, reduces
from autopar.runtime.communication.convert import Stage
from autopar.runtime.communication.flights import Flight
from autopar.runtime.communication.route import Route
from autopar.runtime.communication.unwanted import leave
from autopar.runtime.gradients.accumulation import Accumulation
from autopar.runtime.gradients.gradient_sums import GradientSums
from autopar.runtime.gradients.own_gradients import unshared
from autopar.runtime.ranges import named


class Reductions:
    """The reductions of one call. `parameters`: the tensors of the state by place."""

    def __init__(self, route: Route, parameters: Sequence[torch.Tensor], accumulation: Accumulation) -> None:
        self._thread = threading.get_ident()
        self._route, self._parameters = route, parameters
        self._accumulation, self._held = accumulation, accumulation.held
        self._under_way: list[Flight] = []
        self._arriving: dict[int, list[tuple[Flight, int]]] = {}
        self._sums = GradientSums()  # where several ops or buckets read one parameter in the same layout

    def __del__(self) -> None:
        """End reductions still under way: a pass may end early (gradients of only some parameters, an error)."""
        if dist.is_initialized():
            leave((flight for flights in self._arriving.values() for flight, _ in flights), self._thread)

    def reduce(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None], *, fills: bool) -> None:
        """Launch the reduction of a bucket's gradients (None: none came), or keep them if this pass accumulates only.

        `fills`: the pass adds to `.grad`. A pass that does not leaves accumulated gradients as they are.
        """
        accumulation = self._accumulation
        incoming = list(gradients) if bucket.reduces else [g if g is None else unshared(g) for g in gradients]
        if bucket.reduces and fills:
            holds = self._held or not accumulation.moves()
            for i, (name, stage) in enumerate(zip(bucket.names, bucket.stages, strict=True)):
                gradient = incoming[i]
                if holds and gradient is not None:
                    accumulation.add(name, stage, gradient, self._parameters[bucket.places[i]])
                elif not holds and (waiting := accumulation.take(name, stage)) is not None:
                    incoming[i] = waiting if gradient is None else waiting.add_(gradient)
            if holds:
                return
        self._await(bucket, incoming)
        present = [(i, gradient) for i, gradient in enumerate(incoming) if gradient is not None]
        if not present:
            return
        stages = [bucket.stages[i] for i, _ in present]
        size = sum(stage.reduced_bytes(gradient) for stage, (_, gradient) in zip(stages, present, strict=True))
        for flight_before in due(self._under_way, size):  # launched earlier, so they had time to end
            flight_before.advance()
        with named(f"reduce {bucket.title}"):
            flight = Flight(
                [gradient for _, gradient in present],
                [stage.backward for stage in stages],
                reduction_dtype=stages[0].reduction_dtype,
            )
        self._under_way = [flight_before for flight_before in (*self._under_way, flight) if flight_before.holds_more]
        for number, (i, _) in enumerate(present):
            self._arriving.setdefault(bucket.places[i], []).append((flight, number))

    def drop(self, place: int, stage: Stage) -> None:
        """Forget the sum so far of gradients that no autograd node takes."""
        self._sums.take(place, stage, None)

    def _await(self, bucket: Bucket, incoming: list[torch.Tensor | None]) -> None:
        """Add to a bucket's gradients what earlier buckets left, and leave those that a later bucket will reduce.
        Otherwise each of several replays that read a parameter would reduce its own gradient, and all results would
        stay until the end."""
        leaves = self._route.awaiting.get(bucket, frozenset())
        for i, (place, stage) in enumerate(zip(bucket.places, bucket.stages, strict=True)):
            gradient = self._sums.take(place, stage, incoming[i])
            if i in leaves and gradient is not None:
                self._sums.put(place, stage, unshared(gradient) if gradient is incoming[i] else gradient)
                gradient = None
            incoming[i] = gradient

    def add_up(self, place: int, stage: Stage | None, gradient: torch.Tensor, *, fills: bool) -> None:
        """Add one of several gradients of a parameter that `stage` is to convert or reduce. What earlier passes left to
        be reduced becomes part of this sum, so that there are not two sums in memory."""
        if stage is not None and reduces(stage) and fills:
            name = self._route.names[place]
            if self._held or not self._accumulation.moves():
                self._accumulation.add(name, stage, gradient, self._parameters[place])
                return
            if (waiting := self._accumulation.take(name, stage)) is not None:
                self._sums.add(place, stage, waiting)
        self._sums.add(place, stage, gradient)

    def brings(self, place: int) -> bool:
        """Whether the parameter at `place` gets gradients through buckets; otherwise it gets them from ops alone."""
        return place in self._route.places

    def parameter(self, place: int) -> torch.Tensor:
        """The tensor of the state at `place`."""
        return self._parameters[place]

    def arrived(self, place: int, name: str, *, fills: bool) -> list[torch.Tensor]:
        """The reduced gradients of one parameter, waited for; `fills` as in `reduce`."""
        arriving = self._arriving.pop(place) if place in self._arriving else ()
        gradients = [flight.finish()[number] for flight, number in arriving]
        gradients += self._sums.take_rest(place)
        if arriving:  # a loss that the loop keeps holds this call, which must not hold results
            self._under_way = [under_way for under_way in self._under_way if under_way.holds_more]
        moves = fills and not self._held and self._accumulation.moves()  # before `waits_for`: it counts passes
        if moves and self._accumulation.waits_for(name):
            gradients += self._accumulation.take_rest(name)
        return gradients
