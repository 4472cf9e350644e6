"""Gathers that are under way at once end with what the ranks gave, in eager mode and compiled.

Over gloo, several at once of `_c10d_functional.all_gather_into_tensor` (torch 2.13) bring a rank down within a second.
"""

from __future__ import annotations

from launch import launch


def test_many_at_once() -> None:
    for rank in launch("gather_cases.py", 2):
        for case in ("eager", "compiled"):
            assert "error" not in rank[case], rank[case]["traceback"]
            assert rank[case]["value"] == 0
