"""Several concurrent gathers deliver the ranks' values, in eager mode and compiled.

Over gloo, several concurrent `_c10d_functional.all_gather_into_tensor` (torch 2.13) crash a rank within a second.
"""

from __future__ import annotations

import pytest
from launch import launch


@pytest.mark.parametrize("case", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_many_at_once(case: str) -> None:
    for rank in launch("gather_cases.py", 2, cases=[case]):
        assert "error" not in rank[case], rank[case]["traceback"]
        assert rank[case]["value"] == 0
