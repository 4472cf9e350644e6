"""Every rule of the table, in every way of splitting that it allows, against the unsplit op: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
from named_cases import NAMED
from rule_cases import CASES
from rule_tensors import name_of
from torch._ops import OpOverload

from autopar.strategies.arguments import op_name
from autopar.strategies.check import check
from autopar.strategies.examples import example
from autopar.strategies.table import OPERATORS, TABLE

MESHES = [(2,), (3,), (2, 2)]
EVERY = [(family, case) for cases in (CASES, NAMED) for family, own in cases.items() for case in own]
WITHOUT = {
    "experts routed": "in test_experts and test_routed",
    "empty_like new_empty empty": "their values mean nothing",
    "half bfloat16": "they round, so that summands join to within that alone",
    "cuda": "needs a GPU",
    "T mT": "the tracer writes t and transpose",
    "alias identity requires_grad not_ logsigmoid upsample": "other names of what has a case: of ATen, of older torch",
}


def _made(case: tuple[Any, ...]) -> Any:
    target, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    return example(target, *args, **kwargs)


@pytest.mark.parametrize(
    ("case", "mesh_shape"),
    [
        pytest.param(case, mesh, id=f"{family} {name_of(case)}-{mesh}", marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, (family, case) in enumerate(EVERY)
        for j, mesh in enumerate(MESHES)
    ],
)
def test_split_equals_whole(case: tuple[Any, ...], mesh_shape: tuple[int, ...], ranks: Any) -> None:
    node, tensors = _made(case)
    assert check(node, tensors, mesh_shape, ranks=ranks, most=60) >= 1


def test_every_op_of_the_table_is_run() -> None:
    with_case = {op_name(_made(case)[0]) for _, case in EVERY}
    assert set(TABLE) - with_case == set(" ".join(WITHOUT).split())
    operators = {op_name(node) for _, case in EVERY if isinstance((node := _made(case)[0]).target, OpOverload)}
    assert set(OPERATORS) <= operators
