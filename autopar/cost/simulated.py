"""The result of `cost.simulator`: a planned step as events on streams."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"
_PARTS = {"replay": "recompute", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Event:
    """An op or a collective on one stream ("compute", or an axis' name); `start_seconds` from the step's beginning."""

    name: str
    stream: str
    start_seconds: float
    seconds: float
    phase: str  # forward, replay, backward, optimizer

    @property
    def kind(self) -> str:
        """The part of the step that the event belongs to: compute, recompute, optimizer or communication."""
        return _PARTS.get(self.phase, "compute") if self.stream == COMPUTE else "communication"


@dataclass(frozen=True)
class Simulated:
    """A simulated step; the events of each stream are in the order in which they begin."""

    events: tuple[Event, ...]
    step_seconds: float
    streams: tuple[str, ...]
    compute_seconds: float  # of all ops, as if no collective ran beside them

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to the step: the time that the compute stream waits or is slowed down."""
        return self.step_seconds - self.compute_seconds

    def busy_seconds(self) -> dict[str, float]:
        """How long something runs on each stream."""
        return {name: sum(e.seconds for e in self.events if e.stream == name) for name in self.streams}
