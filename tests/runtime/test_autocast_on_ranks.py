"""A planned model called under `torch.autocast` warns that the plan does not account for it."""

from __future__ import annotations

from launch import launch


def test_autocast_around_a_call_is_told() -> None:
    for rank, found in enumerate(launch("autocast_cases.py", 2)):
        assert found["none"]["value"] == []
        assert len(found["all"]["value"]) == 1
        assert 'precision="bf16"' in found["all"]["value"][0]
        assert found["one"]["error"] == "PlanMismatchError", rank
        assert "torch.autocast around the call" in found["one"]["message"]
