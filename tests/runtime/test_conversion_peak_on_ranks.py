"""The predicted staging memory of conversions matches real ranks, and predicted peaks include it."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from conversion_peak_cases import PEAKS, STAGED
from launch import launch, selected
from thinned import every

QUICK = "conv, tp", "llama, tp, split sequence", "S1, S2", "S2, S1", "view, R", "S2, R, S2"  # some cases of each model
UNDER, OVER = 0.001, 0.03  # fractions by which a step may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Any]]]:
    cases, names = selected(request), set(STAGED)
    found = {2: launch("conversion_peak_cases.py", 2, cases=cases, timeout_seconds=600)}
    if converted := [case for case in cases if case in names]:
        found[4] = launch("conversion_peak_cases.py", 4, cases=converted, timeout_seconds=600)
    return found


@pytest.mark.parametrize("many", [2, 4])
@pytest.mark.parametrize("case", every(4, STAGED))  # one case for each shape and order
def test_what_a_conversion_stages(ranks: dict[int, list[dict[str, Any]]], many: int, case: str) -> None:
    """Never more than predicted on any rank; where all dims divide evenly, exactly the prediction on the last rank."""
    for rank in ranks[many]:
        assert "value" in rank[case], rank[case]
        for pair, peaks, _, _, foreseen in rank[case]["value"]:
            assert all(peak <= most for peak, most in zip(peaks, foreseen, strict=True)), (pair, peaks, foreseen)
    if case.startswith("even"):
        for pair, _, beside, foreseen, _ in ranks[many][-1][case]["value"]:
            assert beside == foreseen, pair


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in PEAKS]
)
def test_peak(ranks: dict[int, list[dict[str, Any]]], case: str) -> None:
    for rank in ranks[2]:
        check_peak(rank[case], under=UNDER, over=OVER)


@pytest.mark.parametrize(("case", "kinds"), [("S1, S2", {"S1", "S2"}), ("S2, S1", {"S1", "S2"})])
def test_a_dim_is_exchanged_for_another(ranks: dict[int, list[dict[str, Any]]], case: str, kinds: set[str]) -> None:
    layouts = {name: (inputs, outputs) for name, inputs, outputs in ranks[2][0][case]["value"]["layouts"]}
    assert {layouts["tanh_3"][1], layouts["tanh_4"][0]} == {f"({kind},)" for kind in kinds}
