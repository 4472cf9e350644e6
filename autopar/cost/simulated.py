"""A planned step as it runs on its streams: what `cost.simulator` finds."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"
_PARTS = {"replay": "recompute", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Event:
    """Something that runs on one stream ("compute", or an axis' name); seconds from the beginning of the step."""

    name: str
    stream: str
    start_seconds: float
    seconds: float
    phase: str  # forward, replay, backward, optimizer

    @property
    def kind(self) -> str:
        """The part of a step that it belongs to: compute, recompute, optimizer or communication."""
        return _PARTS.get(self.phase, "compute") if self.stream == COMPUTE else "communication"


@dataclass(frozen=True)
class Simulated:
    """A step as it runs: its events in the order in which they begin on each stream."""

    events: tuple[Event, ...]
    step_seconds: float
    streams: tuple[str, ...]
    compute_seconds: float  # of all ops, each alone on the device

    @property
    def exposed_seconds(self) -> float:
        """How long the compute stream waits or is slowed down."""
        return self.step_seconds - self.compute_seconds

    def busy_seconds(self) -> dict[str, float]:
        """How long something runs on each stream."""
        return {name: sum(e.seconds for e in self.events if e.stream == name) for name in self.streams}
