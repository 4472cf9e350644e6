"""Arguments of the wrong kind are refused by name, before anything is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.planning.stages import request_of
from autopar.precision import Precision


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 2.0}, "micro_batches is 2.0"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"micro_batches": None}, "micro_batches is None"),
        ({"micro_batches": "2"}, "micro_batches is '2'"),
        ({"time_limit": "5"}, "time_limit is '5'"),
        ({"time_limit": None}, "time_limit is None"),
        ({"time_limit": float("nan")}, "time_limit is nan"),
        ({"constraints": [3]}, r"constraints is \[3\]"),
        ({"constraints": 3}, "constraints is 3"),
        ({"precision": torch.int8}, "precision has torch.int8 for parameter"),
    ],
    ids=str,
)
def test_refused_by_name(options: dict[str, object], message: str) -> None:
    inputs, mesh = {"input": torch.empty(4, 8)}, autopar.Cluster.preset("cpu", (2,))
    with pytest.raises(autopar.InputError, match=message):
        autopar.plan(nn.Linear(8, 8), inputs, mesh, **options)  # type: ignore[arg-type]


def test_several_micro_batches_where_one_is_run() -> None:
    with pytest.raises(autopar.InputError, match=r"micro_batches is \[1, 2\].* compare and search alone choose"):
        request_of(autopar.Cluster.preset("cpu", (2,)), micro_batches=[1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("most_axes", [0, -1, 1.5, True, None, [1, 2]], ids=str)
def test_axes_of_a_mesh_are_counted(most_axes: object) -> None:
    inputs = {"input": torch.empty(4, 8)}
    with pytest.raises(autopar.InputError, match="most_axes is ") as refused:
        autopar.search(nn.Linear(8, 8), inputs, "cpu", 2, most_axes=most_axes)  # type: ignore[arg-type]
    assert "choose among several" not in str(refused.value)


def test_a_precision_is_of_floating_dtypes() -> None:
    with pytest.raises(autopar.InputError, match=r"torch\.int32 for compute"):
        Precision(compute=torch.int32)
    assert Precision.of(torch.bfloat16).compute == torch.bfloat16
