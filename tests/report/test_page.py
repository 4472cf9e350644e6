"""The HTML report is complete, self-contained and agrees with the plan; pictures agree with their figures."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.plans import Alternative, Moment, Plan, TradeoffPoint
from autopar.report.figures import busy_parts, step_parts
from autopar.report.page import answers, page, snippet, why_not
from autopar.report.timeline import Timeline, in_time, timeline
from autopar.sizes import show_bytes

_VOID = {"meta", "link", "input", "br", "line", "path", "polyline"}


class _Checker(HTMLParser):
    """Checks that tags are closed in order, and collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.sources.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def _checked(text: str) -> _Checker:
    checker = _Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker


def _compared(plan: Plan) -> Plan:
    slower = replace(plan.predicted, step_seconds=0.5, comm_seconds=0.27, moments=())
    alternatives = (
        Alternative("ddp", False, slower, 2**30, smallest_budget_bytes=80 * 2**20),
        Alternative("fsdp", True, slower, 2**20),
        Alternative("hsdp", False, None, note="constraint 'hsdp' needs a mesh of two axes or more"),
    )
    return replace(plan, comparison=alternatives)


def test_one_file_that_needs_nothing_else(plan: Plan, tmp_path: Path) -> None:
    plan.to_html(tmp_path / "report.html", title="A model")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    checker = _checked(text)
    assert all(source.startswith(("#", "data:")) for source in checker.sources)
    assert {source[1:] for source in checker.sources if source.startswith("#")} <= set(checker.ids)
    assert len(checker.ids) == len(set(checker.ids))
    assert not re.search(r"https?://|@import|url\(", text)


def test_what_a_model_is_called_is_text(plan: Plan) -> None:
    hostile = replace(plan, notes=("<script>alert(1)</script>",), constraints=('"><img src=x>',))
    text = page(hostile, title="<b>&")
    _checked(text)
    assert "<script>alert" not in text and "<img" not in text and "<b>&<" not in text


def test_figures_are_the_plans(plan: Plan) -> None:
    text = page(_compared(plan))
    for moment in plan.predicted.moments:
        assert moment.name in text and show_bytes(moment.total_bytes) in text
    assert "transformer.h.{0,1,3}" in text
    assert "needs 80.00 MiB" in text
    assert "hsdp" in text and "two axes" in text
    assert "torch.foo has no rule" in text
    assert "no plan whose equal blocks decide alike takes less than" in text  # the bound does not hold for other plans


def test_plans_without_this_or_that_have_a_page_too(plan: Plan) -> None:
    bare = replace(plan, recompute=(), collectives=(), memory_budget_bytes=None, comparison=(), notes=(), parameters=())
    for made in (bare, replace(bare, predicted=replace(bare.predicted, moments=(), flops=0))):
        _checked(page(made))
        _checked(snippet(made))


def test_other_budgets_are_a_curve_and_a_table(plan: Plan) -> None:
    points = tuple(TradeoffPoint(i * 2**20, i * 2**20, 1 / i, 0.0) for i in (10, 20, 40))
    text = page(replace(plan, tradeoff=points))
    _checked(text)
    (drawn,) = re.findall(r'<polyline points="([^"]*)"', text)
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, pair.split(","))) for pair in drawn.split()]
    assert (x0, x2) == (0, 1000) and 2 * (x1 - x0) == pytest.approx(x2 - x1, abs=0.2)
    assert 400 - y0 == pytest.approx(2 * (400 - y1)) == pytest.approx(4 * (400 - y2))
    assert "20.0 MiB" in text and "<polyline" not in page(plan)


def test_the_four_questions(plan: Plan) -> None:
    fits, bottleneck, recomputed, _ = answers(plan)
    assert fits[:2] == ("Does it fit?", "Yes: 43.0 MiB of 64.0 MiB")
    assert bottleneck[1] == "Compute: 80.0 % of 250 ms"
    assert re.fullmatch(r"\d+ of \d+ ops", recomputed[1]) and "transformer.h.{0,1,3}" in recomputed[2]
    tight = replace(plan, memory_budget_bytes=40 * 2**20)
    assert answers(tight)[0][1].startswith("No: ") and "3.0 MiB too much" in answers(tight)[0][2]


def test_bars_add_up_to_the_step(plan: Plan) -> None:
    """Hidden time is subtracted from communication first, then from recompute if that has replayed collectives."""
    hiding = replace(plan.predicted, step_seconds=0.225)  # the parts add up to 0.25 seconds
    assert busy_parts(plan.predicted) == step_parts(plan.predicted)
    for replayed, communication, recompute in ((0.0, 0.0, 0.015), (0.01, 0.005, 0.01)):
        busy = busy_parts(hiding, replayed)
        assert sum(busy.values()) == pytest.approx(0.225)
        assert (busy["communication"], busy["recompute"]) == pytest.approx((communication, recompute))


def test_a_scheme_a_little_slower(plan: Plan) -> None:
    fsdp = replace(plan.predicted, step_seconds=0.251)
    made = replace(plan, comparison=(Alternative("fsdp", True, fsdp),))
    assert why_not(made)[1] == "It is 0.4 % slower: 251 ms"


def test_why_not_fsdp(plan: Plan) -> None:
    assert why_not(plan)[:2] == ("Why not FSDP?", "Not compared")
    _, answer, more = why_not(_compared(plan))
    assert answer == "It takes 2.00 times as long: 500 ms"
    assert more.startswith("250 ms more communication a step")
    ddp, fsdp, hsdp = _compared(plan).comparison
    unfit = replace(ddp, name="fsdp")
    assert why_not(replace(plan, comparison=(unfit,)))[1] == "It does not fit"
    assert why_not(replace(plan, comparison=(replace(fsdp, predicted=plan.predicted),)))[1] == "It is as fast"
    assert why_not(replace(plan, comparison=(replace(hsdp, name="fsdp"),)))[1] == "It has no plan"
    assert why_not(replace(plan, comparison=(ddp,)))[0] == "Why not DDP?"


def test_a_notebook_shows_the_answers(plan: Plan) -> None:
    text = plan._repr_html_()
    _checked(text)
    assert "Does it fit?" in text and "Layouts of op outputs by layer" in text
    for name, count in plan.predicted.parts.items():
        assert not count or f'title="{name}: {show_bytes(count)}"' in text
    widths = [float(width) for width in re.findall(r"width: ([0-9.]+)%", text)]
    assert all(0 <= width <= 100 for width in widths)
    assert sum(widths) <= 200.1  # two bars, each within its limits


def test_time_runs_backwards_through_the_layers() -> None:
    moments = [Moment(name, {"activations": 1}) for name in ("backward of a", "backward of b", "optimizer step")]
    assert [m.name for m in in_time(moments)] == ["backward of b", "backward of a", "optimizer step"]
    forward = [Moment("a", {}), Moment("b", {})]
    assert in_time(forward) == tuple(forward)


_bytes = st.dictionaries(st.sampled_from(["parameters", "activations", "else"]), st.integers(1, 2**40), min_size=1)


@given(st.lists(_bytes, min_size=1, max_size=6))
def test_the_picture_has_the_areas_of_its_figures(parts: list[dict[str, int]]) -> None:
    moments = tuple(Moment(str(i), p) for i, p in enumerate(parts))
    kinds = tuple(sorted({kind for p in parts for kind in p}))
    made = Timeline(moments, kinds, max(m.total_bytes for m in moments), None)
    for kind in kinds:
        area = _area(made.outline(kind, 1000, 400)) * made.top_bytes / 400 * len(moments) / 1000
        assert area == pytest.approx(sum(p.get(kind, 0) for p in parts), abs=0.002 * made.top_bytes * len(moments))


def _area(path: str) -> float:
    """The area enclosed by a path of horizontal and vertical lines."""
    x, y = map(float, path[1 : path.index("H")].split())
    total = 0.0
    for command, number in re.findall(r"([HV])([-0-9.]+)", path):
        if command == "H":
            total -= (float(number) - x) * y
            x = float(number)
        else:
            y = float(number)
    return abs(total + x * y)  # Z returns to x = 0


def test_a_limit_out_of_sight_is_left_out(plan: Plan) -> None:
    near, far = timeline(plan), timeline(replace(plan, memory_budget_bytes=1 << 40))
    assert near is not None and near.limit_bytes == plan.memory_budget_bytes
    assert far is not None and far.limit_bytes is None
    assert all(0 <= t.share_of_height(plan.predicted.peak_bytes) <= 100 for t in (near, far))
