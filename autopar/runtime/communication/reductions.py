"""Reductions of one call: the gradients of its buckets, in the background of the backward pass.

A reduction begins when the gradients of a bucket are there, and is waited for by the parameters: their nodes were made
before all others of the call, so autograd runs them after all others that are ready (those of parameters that no bucket
has: before). Some are waited for sooner, for the memory that they hold (`cost.buckets.reductions`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.cost.buckets.reductions import due
from autopar.runtime.communication.buckets import Bucket
from autopar.runtime.communication.convert import Stage
from autopar.runtime.communication.flights import Flight
from autopar.runtime.communication.route import Route
from autopar.runtime.communication.unwanted import leave
from autopar.runtime.gradients.accumulation import Accumulation
from autopar.runtime.gradients.gradient_sums import GradientSums
from autopar.runtime.gradients.own_gradients import own
from autopar.runtime.ranges import named


class Reductions:
    """Those of one call. `parameters`: what holds the state, by place."""

    def __init__(self, route: Route, parameters: Sequence[torch.Tensor], accumulation: Accumulation) -> None:
        self._thread = threading.get_ident()
        self._route, self._parameters = route, parameters
        self._accumulation, self._held = accumulation, accumulation.held
        self._under_way: list[Flight] = []
        self._arriving: dict[int, list[tuple[Flight, int]]] = {}
        self._sums = GradientSums()  # of several ops, or buckets, that read one parameter alike

    def __del__(self) -> None:
        """A pass that ended early (gradients of some parameters alone, an error) leaves reductions under way."""
        if dist.is_initialized():
            leave((flight for some in self._arriving.values() for flight, _ in some), self._thread)

    def reduce(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None], *, fills: bool) -> None:
        """Begin to reduce the gradients of a bucket (None: none came), or keep them where this pass moves none.

        `fills`: the pass adds to `.grad`. One that does not is nothing to those that wait.
        """
        accumulation = self._accumulation
        given = list(gradients) if bucket.reduces else [one if one is None else own(one) for one in gradients]
        if bucket.reduces and fills:
            holds = self._held or not accumulation.moves()
            for i, (name, stage) in enumerate(zip(bucket.names, bucket.stages, strict=True)):
                gradient = given[i]
                if holds and gradient is not None:
                    accumulation.add(name, stage, gradient, self._parameters[bucket.places[i]])
                elif not holds and (waiting := accumulation.take(name, stage)) is not None:
                    given[i] = waiting if gradient is None else waiting.add_(gradient)
            if holds:
                return
        self._await(bucket, given)
        there = [(i, gradient) for i, gradient in enumerate(given) if gradient is not None]
        if not there:
            return
        stages = [bucket.stages[i] for i, _ in there]
        size = sum(stage.reduced_bytes(gradient) for stage, (_, gradient) in zip(stages, there, strict=True))
        for one in due(self._under_way, size):  # they had all the time since
            one.advance()
        with named(f"reduce {bucket.title}"):
            flight = Flight(
                [gradient for _, gradient in there],
                [stage.backward for stage in stages],
                reduction_dtype=stages[0].reduction_dtype,
            )
        self._under_way = [one for one in (*self._under_way, flight) if one.holds_more]
        for number, (i, _) in enumerate(there):
            self._arriving.setdefault(bucket.places[i], []).append((flight, number))

    def drop(self, place: int, stage: Stage) -> None:
        """Forget the sum so far of gradients that nobody takes."""
        self._sums.take(place, stage, None)

    def _await(self, bucket: Bucket, given: list[torch.Tensor | None]) -> None:
        """Add to a bucket's gradients what others have left, and leave those that one to come will reduce: each of
        several replays that read a parameter would reduce its own, and the results stay until the end."""
        leaves = self._route.awaiting.get(bucket, frozenset())
        for i, (place, stage) in enumerate(zip(bucket.places, bucket.stages, strict=True)):
            gradient = self._sums.take(place, stage, given[i])
            if i in leaves and gradient is not None:
                self._sums.put(place, stage, own(gradient) if gradient is given[i] else gradient)
                gradient = None
            given[i] = gradient

    def add_up(self, place: int, stage: Stage | None, gradient: torch.Tensor, *, fills: bool) -> None:
        """One of several gradients of a parameter that `stage` is to reduce; what waits from passes before is part of
        the sum, so that it is not there twice."""
        if stage is not None and fills:
            name = self._route.names[place]
            if self._held or not self._accumulation.moves():
                self._accumulation.add(name, stage, gradient, self._parameters[place])
                return
            if (waiting := self._accumulation.take(name, stage)) is not None:
                self._sums.add(place, stage, waiting)
        self._sums.add(place, stage, gradient)

    def brings(self, place: int) -> bool:
        """Whether gradients of the parameter at a place come this way, or else from ops alone."""
        return place in self._route.places

    def parameter(self, place: int) -> torch.Tensor:
        """What the state has at a place."""
        return self._parameters[place]

    def arrived(self, place: int, name: str, *, fills: bool) -> list[torch.Tensor]:
        """The reduced gradients of one parameter, waited for; `fills` as in `reduce`."""
        arriving = self._arriving.pop(place) if place in self._arriving else ()
        found = [flight.finish()[number] for flight, number in arriving]
        found += self._sums.take_rest(place)
        if arriving:  # what has landed is the parameters' alone: a loss that the loop keeps holds this call
            self._under_way = [one for one in self._under_way if one.holds_more]
        moves = fills and not self._held and self._accumulation.moves()  # asked in any case: it counts passes
        if moves and self._accumulation.waits_for(name):
            found += self._accumulation.take_rest(name)
        return found
