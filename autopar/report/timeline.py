"""Bytes over a step as outlines to draw: one stair a kind, stacked, in the order in which time runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plans import Moment, Plan, TradeoffPoint
from autopar.report.figures import limit_bytes
from autopar.report.glossary import MEMORY

_FROM_BELOW = tuple(MEMORY)  # what is always there first, what is gone soonest last


@dataclass(frozen=True)
class Timeline:
    """`moments` in time order; `top_bytes` is the height of the picture; `kinds` from below."""

    moments: tuple[Moment, ...]
    kinds: tuple[str, ...]
    top_bytes: int
    limit_bytes: int | None

    def outline(self, kind: str, width: int, height: int) -> str:
        """The stair of one kind as SVG path data, in a picture of `width` by `height` units, y downwards."""
        at = self.kinds.index(kind)
        lower = [sum(m.parts.get(k, 0) for k in self.kinds[:at]) for m in self.moments]
        upper = [low + m.parts.get(kind, 0) for low, m in zip(lower, self.moments, strict=True)]
        step = width / len(self.moments)

        def y(count: int) -> str:
            return f"{height - height * count / self.top_bytes:.1f}".rstrip("0").rstrip(".")

        there = [f"H{step * i:.1f}V{y(u)}" for i, u in enumerate(upper)]
        back = [f"H{step * (i + 1):.1f}V{y(low)}" for i, low in reversed(list(enumerate(lower)))]
        return f"M0 {y(lower[0])}" + "".join(there) + "".join(back) + "Z"

    def share_of_height(self, count: int) -> float:
        """Percent of the height at which so many bytes stand, from above."""
        return 100 - 100 * count / self.top_bytes


def timeline(plan: Plan) -> Timeline | None:
    """The moments of a plan: those of forward, if any, backward from the last layers to the first, then the optimizer's
    step.

    The limit is in the picture unless it is so far above the peak that nothing else would be seen.
    """
    moments = in_time(plan.predicted.moments)
    if not moments:
        return None
    present = {kind for m in moments for kind, count in m.parts.items() if count}
    kinds = [kind for kind in _FROM_BELOW if kind in present] + sorted(present - set(_FROM_BELOW))
    peak, limit = max(m.total_bytes for m in moments), limit_bytes(plan)
    shown = limit if limit is not None and limit <= 3 * peak else None
    return Timeline(moments, tuple(kinds), max(int(1.06 * max(peak, shown or 0)), 1), shown)


def in_time(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Predicted moments stand in the order of the graph; backward runs the other way."""
    backward = [m for m in moments if m.name.startswith("backward of ")]
    return (*(m for m in moments if m not in backward and not _last(m)), *reversed(backward), *filter(_last, moments))


def _last(moment: Moment) -> bool:
    return moment.name == "optimizer step"


def curve(points: Sequence[TradeoffPoint], width: int, height: int) -> list[tuple[float, float]]:
    """Where the points of budget against seconds lie in a picture, y downwards from zero seconds at the bottom."""
    least, most = points[0].budget_bytes, points[-1].budget_bytes
    slowest = max(p.step_seconds for p in points) or 1.0
    span = max(most - least, 1)
    return [(width * (p.budget_bytes - least) / span, height * (1 - 0.92 * p.step_seconds / slowest)) for p in points]
