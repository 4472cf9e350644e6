"""The simulated step as lanes to draw: one for each stream, coloured by what runs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plans import Plan, Span
from autopar.report.glossary import STEP


@dataclass(frozen=True)
class Lane:
    """The spans of one stream; `step_seconds` is the length of the step, equal for all lanes."""

    stream: str
    spans: tuple[Span, ...]
    step_seconds: float

    @property
    def busy_seconds(self) -> float:
        return sum(span.seconds for span in self.spans)

    def seconds_of(self, kind: str) -> float:
        return sum(span.seconds for span in self.spans if span.kind == kind)

    def outline(self, kind: str, width: int, height: int) -> str:
        """The spans of one kind as SVG path data, in a picture of `width` by `height` units."""
        scale = width / (self.step_seconds or 1.0)
        bars = ((s.start_seconds * scale, s.seconds * scale) for s in self.spans if s.kind == kind)
        return "".join(f"M{x:.1f} 0h{w:.1f}v{height}h-{w:.1f}z" for x, w in bars)


def lanes(plan: Plan) -> list[Lane]:
    """The lanes of a plan, compute first; empty unless `compare` made the plan."""
    end = max((span.start_seconds + span.seconds for span in plan.streams), default=0.0)
    names = dict.fromkeys(span.stream for span in plan.streams)
    return [Lane(name, tuple(s for s in plan.streams if s.stream == name), end) for name in names]


def kinds(lanes: list[Lane]) -> list[str]:
    """The kinds of work on any of the lanes, in the order of the report."""
    present = {span.kind for lane in lanes for span in lane.spans}
    return [kind for kind in STEP if kind in present]
