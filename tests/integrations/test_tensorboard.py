"""Scalars of any mapping are logged under their names; values that are no scalars are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import autopar
from autopar import Cluster, InputError
from autopar.integrations.tensorboard import TensorBoard


def _log(folder: Path) -> EventAccumulator:
    log = EventAccumulator(str(folder))
    log.Reload()
    return log


def test_any_scalars_are_logged(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        board.log(3, {"loss": torch.tensor([0.5]), "step": 2, "memory": {"peak": 1e9, "kind": {"saved": True}}})
    log = _log(tmp_path)
    assert sorted(log.Tags()["scalars"]) == ["loss", "memory/kind/saved", "memory/peak", "step"]
    (event,) = log.Scalars("loss")
    assert (event.step, event.value) == (3, 0.5)


def test_a_plan_is_logged_beside(tmp_path: Path) -> None:
    layer, batch = nn.Linear(8, 8), {"input": torch.empty(8, 8)}
    plan = autopar.plan(layer, batch, Cluster.preset("cpu", (2,)), loss_fn=lambda output: output.sum())
    with TensorBoard(tmp_path, plan) as board:
        board.log(0, {"step_seconds": 1.0})
        board.log(1, {"step_seconds": 2.0})
    log = _log(tmp_path)
    assert [e.value for e in log.Scalars("predicted/peak_bytes")] == [plan.predicted.peak_bytes] * 2
    (text,) = log.Tensors("plan/text_summary")
    assert plan.certificate.status in str(text.tensor_proto.string_val)


@pytest.mark.parametrize(
    ("value", "told"),
    [("0.5", "'loss' is str"), (torch.ones(2, 3), r"'loss' is a tensor of \(2, 3\)"), (None, "NoneType")],
)
def test_what_is_no_scalar_is_refused(value: object, told: str, tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board, pytest.raises(InputError, match=told):
        board.log(0, {"loss": value})


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no plan"):
        TensorBoard(tmp_path, nn.Linear(2, 2))
