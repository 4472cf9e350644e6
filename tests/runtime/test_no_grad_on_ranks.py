"""Calls without gradients after a step equal one process, also for tensors that are only communicated in backward."""

from __future__ import annotations

import pytest
from launch import launch
from no_grad_cases import CASES


@pytest.mark.parametrize("ranks", list(CASES))
def test_losses_are_those_of_one_process(ranks: int) -> None:
    for rank in launch("no_grad_cases.py", ranks):
        for case in CASES[ranks]:
            assert "value" in rank[case], rank[case]
            assert rank[case]["value"] < 1e-12, case
