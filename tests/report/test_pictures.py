"""Pictures for papers show what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import matplotlib as mpl
import pytest

from autopar.errors import InputError
from autopar.plans import Alternative, Plan, TradeoffPoint

mpl.use("Agg")
from matplotlib import pyplot

GIB = 1 << 30


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def test_memory_stacks_to_the_moments(plan: Plan) -> None:
    axes = plan.plot_memory()
    stairs = {patch.get_label(): patch.get_data() for patch in axes.patches}
    top = max((data.values for data in stairs.values()), key=sum)
    in_time = [plan.predicted.moments[0], plan.predicted.moments[1]]
    assert list(top) == pytest.approx([m.total_bytes / GIB for m in in_time])
    assert set(stairs) == {kind for m in in_time for kind in m.parts}
    (budget,) = axes.lines
    assert list(budget.get_ydata()) == [plan.memory_budget_bytes / GIB] * 2  # type: ignore[operator]


def test_seconds_of_plan_and_alternatives(plan: Plan) -> None:
    slower = replace(plan.predicted, step_seconds=0.35, comm_seconds=0.12, moments=())
    compared = replace(plan, comparison=(Alternative("ddp", False, slower), Alternative("hsdp", False, None)))
    axes = compared.plot_timeline()
    ends = [
        round(max(p.get_x() + p.get_width() for p in axes.patches if round(p.get_y() + 0.4) == i), 6) for i in (0, 1)
    ]
    assert ends == [0.25, 0.35]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["this plan", "ddp (does not fit)"]


def test_the_tradeoff_is_the_curve(plan: Plan) -> None:
    with pytest.raises(InputError, match="tradeoff=8"):
        plan.plot_tradeoff()
    points = tuple(TradeoffPoint(i * GIB, i * GIB, 1 / i, 0.0) for i in (1, 2, 4))
    axes = replace(plan, tradeoff=points).plot_tradeoff()
    assert list(axes.lines[0].get_xdata()) == [1, 2, 4]
    assert list(axes.lines[0].get_ydata()) == [1, 0.5, 0.25]


def test_pictures_go_where_they_are_asked(plan: Plan) -> None:
    _, both = pyplot.subplots(1, 2)
    assert plan.plot_memory(both[0]) is both[0]
    assert plan.plot_timeline(both[1]) is both[1]
