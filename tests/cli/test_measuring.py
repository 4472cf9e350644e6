"""`autopar profile`: what it measures, and what it reports about accuracy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run

from autopar import Cluster
from autopar.cli import measuring


def test_profile_measures_every_axis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mesh", "1x2", "--axis-names", "dp,tp", "--seconds", "0.5", "-o", "here.json"]
    assert run("profile", *words, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(axis["name"], axis["size"]) for axis in figures["axes"]] == [("dp", 1), ("tp", 2)]
    assert run("plan", "users_models:with_inputs", "--cluster", "here.json", "--mesh", "1x2") == 0
    assert "dp=1 x tp=2" in capsys.readouterr().out


@pytest.mark.parametrize(("apart", "is_told"), [(0.05, False), (0.8, True)])
def test_repeats_that_lie_far_apart_are_told(apart: float, is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    spreads = {"launches": apart, "optimizer": apart, "pointwise": 3 * apart}
    measuring._tell(replace(Cluster.preset("cpu", (2,)), spreads=spreads), json=False)
    said = capsys.readouterr()
    assert f"±{100 * apart:.0f} % in the median, ±{300 * apart:.0f} % for pointwise" in said.out
    assert ("Repeated measurements differ a lot" in said.err) is is_told
