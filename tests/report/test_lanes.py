"""The simulated step in the report: the lanes show the simulator's events."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import Cluster, Plan, compare, simulate
from autopar.plans import Span
from autopar.report.lanes import Lane, kinds, lanes
from autopar.report.page import page


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


EXAMPLES = {"input": torch.empty(64, 256, device="meta"), "target": torch.empty(64, 256, device="meta")}


@pytest.fixture(scope="module")
def compared(model: nn.Module) -> Plan:
    cluster = Cluster.preset("h100", shape=(2, 2), axis_names=("dp", "tp"))
    return compare(model, EXAMPLES, cluster, constraints="fsdp+tp", against=["ddp"], loss_fn=nn.functional.mse_loss)


def test_lanes_are_busy_as_long_as_the_events_run(model: nn.Module, compared: Plan) -> None:
    step = simulate(model, EXAMPLES, compared, loss_fn=nn.functional.mse_loss)
    found = {lane.stream: lane for lane in lanes(compared)}
    assert set(found) == {e.stream for e in step.events if e.seconds}
    closed = len(step.events) * step.step_seconds / 1000  # upper bound of what closing short pauses can add
    for name, seconds in step.busy_seconds().items():
        assert seconds - 1e-12 <= found[name].busy_seconds <= seconds + closed
    assert max(lane.step_seconds for lane in found.values()) == pytest.approx(step.step_seconds)


def test_spans_do_not_overlap_and_stay_in_order(compared: Plan) -> None:
    for lane in lanes(compared):
        for one, next_one in zip(lane.spans, lane.spans[1:], strict=False):
            assert one.start_seconds + one.seconds <= next_one.start_seconds + 1e-12


def test_outlines_have_the_widths_of_their_seconds() -> None:
    spans = (Span("dp", "communication", 1.0, 2.0), Span("dp", "communication", 4.0, 1.0))
    widths = re.findall(r"M([\d.]+) 0h([\d.]+)", Lane("dp", spans, 10.0).outline("communication", 1000, 20))
    assert widths == [("100.0", "200.0"), ("400.0", "100.0")]


def test_the_page_has_a_lane_a_stream(compared: Plan) -> None:
    text = page(compared, "net")
    assert text.count('class="lane"') == len(lanes(compared)) >= 2
    assert "optimizer" in kinds(lanes(compared))
    assert Plan.from_json(compared.to_json()).streams == compared.streams
    assert 'class="lane"' not in page(replace(compared, streams=()), "net")
