"""The benchmark of tracing speed measures what it reports."""

import pytest
import trace_speed


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way == "dynamo" else []) for way in trace_speed.WAYS]
)
def test_every_way_captures_a_shallow_model(way):
    result = trace_speed.measure(way, "gpt2", 2, 1)
    assert len(result["seconds"]) == 2
    assert all(seconds > 0 for seconds in result["seconds"])
    assert result["nodes"] > 40


def test_depth_changes_the_model():
    shallow, deep = (trace_speed.measure("trace", "llama-7b", 1, layers)["nodes"] for layers in (1, 3))
    assert deep > 1.5 * shallow
