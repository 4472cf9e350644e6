"""accelerate saves the same for a planned model as for a plain one, and each can resume from the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from running import run_cases


def test_two_processes_are_one(tmp_path: Path) -> None:
    one = run_cases("accelerate_cases.py", tmp_path / "one")
    two = run_cases("accelerate_cases.py", tmp_path / "two", tmp_path / "one", processes=2)
    again = run_cases("accelerate_cases.py", tmp_path / "three", tmp_path / "two")
    for case in ("weights", "hooks"):
        assert one.pop(case) and two.pop(case), case
    half, planned_half = one.pop("half"), two.pop("half")
    losses, predicted = one.pop("outside-ddp")
    again.pop("outside-ddp")
    for preset in ("ddp", "fsdp", "tp"):
        mine, rows = two.pop(f"outside-{preset}")
        assert mine == pytest.approx(losses, rel=1e-5), preset
        assert rows == predicted, preset
    others, masks = (two.pop("of another run"), again.pop("of another run")), two.pop("dropout")
    assert set(two) == {f"{preset}-{safe}" for preset in ("ddp", "fsdp", "tp") for safe in (True, False)}
    right = one["ddp-True"][0]
    for name, (went_on, resumed) in two.items():
        assert went_on == pytest.approx(right, rel=1e-5), name
        assert resumed == pytest.approx(right, rel=1e-5), name
    for losses in others:
        assert losses == pytest.approx(right, rel=1e-5)
    assert masks[1] == pytest.approx(masks[0], rel=1e-6) != pytest.approx(right, rel=1e-4)
    assert planned_half[0] == pytest.approx(half[0], rel=2e-3)
    assert planned_half[1] == half[1] == ["torch.float32"]
    assert "mixed_precision='bf16', and precision is part of the plan: give autoparallelize" in planned_half[2]
