"""Ops and modules of PyTorch's own test database give the results of eager mode under random plans.

A clear refusal passes; wrong results and other errors fail. `python tests/runtime/opinfo_sweep.py WORD` shows the
outcomes of single ops.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from one_op import database, sized
from opinfo_sweep import SIZES, Outcome, modules_swept, swept

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch's own samples, and of ops without a rule
FEW = ("as_strided", "bucketize", "cumsum", "istft", "masked_fill", "nn.functional.conv_transpose2d", "softmax", "tile")
BLOCKS = 24


def check(outcomes: Iterable[Outcome]) -> None:
    found = list(outcomes)
    assert any(outcome.kind == "passed" for outcome in found)
    failed = [" | ".join(outcome) for outcome in found if outcome.kind in ("wrong", "crashed")]
    assert not failed, "\n".join(failed[:20])


@pytest.mark.parametrize("name", FEW)
def test_one_op(name: str) -> None:
    ops, module = database()
    with sized(module, SIZES["even"]):
        check(outcome for op in ops if op.name == name for outcome in swept(op, 2, 1, "even"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_op(block: int, sizes: str) -> None:
    ops, module = database()
    with sized(module, SIZES[sizes]):
        check(outcome for op in ops[block::BLOCKS] for outcome in swept(op, 4, 1, sizes))


@pytest.mark.slow
def test_every_module() -> None:
    check(modules_swept(3, 1))
