"""A vocabulary of 257 sharded over two and four ranks: results of one process, and the predicted bytes."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, selected
from vocabulary_cases import CASES

QUICK = "gpt2-2", "llama-2x2"
EXACT = 1e-8  # relative error in float64 after AdamW steps


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("vocabulary")
    found = {}
    for ranks, every in CASES.items():
        cases = [case for case in every if case in selected(request)]
        given = {"FOLDER": str(folder)}
        report = launch("vocabulary_cases.py", ranks, cases=cases, environment=given, timeout_seconds=600)
        for case in cases:
            for rank in report:
                assert "error" not in rank[case], rank[case]["traceback"]
            found[case] = report[0][case]["value"]
    return found


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for cases in CASES.values() for case in cases],
)
def test_equals_one_process(case: str, reports: dict[str, dict[str, Any]]) -> None:
    found = reports[case]
    assert "Shard(dim=2)" in found["logits"]
    assert "embedding_vocab" in found["locals"]
    assert all("S1" in layout for layout in found["loss"])  # rows and tokens are one dim here
    assert max(found[f"{what}_error"] for what in ("loss", "parameter", "logits")) < EXACT, found
    assert found["loaded_error"] == found["exported_error"] == found["read_error"] == 0
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.02), found
