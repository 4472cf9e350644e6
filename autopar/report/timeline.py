"""Bytes over the moments of a step as stacked outlines to draw, one for each kind of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plans import Moment, Plan, TradeoffPoint
from autopar.report.figures import limit_bytes
from autopar.report.glossary import MEMORY

_FROM_BELOW = tuple(MEMORY)  # kinds that live longest are at the bottom of the stack


@dataclass(frozen=True)
class Timeline:
    """The picture: `moments` in time order, `kinds` from the bottom up, `top_bytes` the height of the y axis."""

    moments: tuple[Moment, ...]
    kinds: tuple[str, ...]
    top_bytes: int
    limit_bytes: int | None

    def outline(self, kind: str, width: int, height: int) -> str:
        """The area of one kind as SVG path data, in a picture of `width` by `height` units, y downwards."""
        at = self.kinds.index(kind)
        lower = [sum(m.parts.get(k, 0) for k in self.kinds[:at]) for m in self.moments]
        upper = [low + m.parts.get(kind, 0) for low, m in zip(lower, self.moments, strict=True)]
        step = width / len(self.moments)

        def y(count: int) -> str:
            return f"{height - height * count / self.top_bytes:.1f}".rstrip("0").rstrip(".")

        forth = [f"H{step * i:.1f}V{y(u)}" for i, u in enumerate(upper)]
        back = [f"H{step * (i + 1):.1f}V{y(low)}" for i, low in reversed(list(enumerate(lower)))]
        return f"M0 {y(lower[0])}" + "".join(forth) + "".join(back) + "Z"

    def share_of_height(self, count: int) -> float:
        """The position of a number of bytes on the y axis, in percent of the height from the top."""
        return 100 - 100 * count / self.top_bytes


def timeline(plan: Plan) -> Timeline | None:
    """The moments of a plan in time order; None if it has none.

    The limit is drawn unless it is over three times the peak: the rest of the picture would then be too small.
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
    """Moments, predicted in graph order, in time order: forward, backward in reverse, then the optimizer step."""
    backward = [m for m in moments if m.name.startswith("backward of ")]
    return (*(m for m in moments if m not in backward and not _last(m)), *reversed(backward), *filter(_last, moments))


def _last(moment: Moment) -> bool:
    return moment.name == "optimizer step"


def curve(points: Sequence[TradeoffPoint], width: int, height: int) -> list[tuple[float, float]]:
    """Coordinates of the points (budget, seconds) in a picture: y is downwards, zero seconds are at the bottom."""
    least, most = points[0].budget_bytes, points[-1].budget_bytes
    slowest = max(p.step_seconds for p in points) or 1.0
    span = max(most - least, 1)
    return [(width * (p.budget_bytes - least) / span, height * (1 - 0.92 * p.step_seconds / slowest)) for p in points]
