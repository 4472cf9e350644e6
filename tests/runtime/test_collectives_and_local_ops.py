"""Conversions and local ops on real processes: for each number of ranks one launch runs all cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_script

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.mark.parametrize(
    ("ranks", "one_of"), [(2, 4), *(pytest.param(ranks, 1, marks=pytest.mark.slow) for ranks in (2, 4))]
)
def test_on_ranks(ranks: int, one_of: int, tmp_path: Path) -> None:
    """On every rank each case equals one process, and its collectives are those announced."""
    run_script(WORKER, str(tmp_path), str(one_of), folder=tmp_path, ranks=ranks)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert all(cases.keys() == found[0].keys() and len(cases) > 100 for cases in found)
    wrong = {f"rank {r}: {name}": text for r, cases in enumerate(found) for name, text in cases.items() if text}
    assert not wrong, "\n".join(f"{name}\n{text}" for name, text in list(wrong.items())[:8])
