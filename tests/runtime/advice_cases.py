"""Mistakes in training loops that torch refuses with an error; the advice added to the error, on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from habit_cases import Halves, planned
from loop_cases import ROWS
from torch import nn

from autopar.runtime.dtensors.advice import advice_for


class Scores(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def advised() -> list[list[str]]:
    """The advice added to errors of torch: an outside loss, averages by hand, mixed lists, a slice, a scaler."""
    model = planned("fsdp", Halves().double())
    model(ROWS)["x"].sum().backward()
    output = model(ROWS)["x"]
    [parameter, *_] = model.parameters()
    alone = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    alone.grad = torch.ones_like(alone)

    def trained_by(kind: Any, **options: Any) -> None:
        model = planned("fsdp")
        model(ROWS).sum().backward()
        kind(model.parameters(), lr=0.1, **options).step()

    def scaled_between_micro_batches() -> None:
        model = planned("fsdp", micro_batches=2)
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
        scaler.scale(model(ROWS).sum()).backward()
        scaler.step(optimizer)

    def clipped_between_micro_batches() -> None:
        model = planned("fsdp", micro_batches=2)
        model(ROWS).sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)

    def rows_of_all() -> None:
        model = planned("tp", Scores(16, 4).double(), inputs="local")
        nn.functional.cross_entropy(model(ROWS[:4]), torch.zeros(4, dtype=torch.long))

    mistakes = (
        (lambda: nn.functional.mse_loss(model(ROWS)["x"], ROWS), "as loss_fn=... to autoparallelize"),
        (lambda: dist.all_reduce(parameter.grad), "summed over the ranks already"),
        (lambda: nn.utils.clip_grad_norm_([parameter, alone], 1.0), "clip_grads_with_norm_"),
        (lambda: torch._foreach_add([parameter.detach(), torch.zeros(2)], 1.0), "or write in place"),
        (lambda: trained_by(torch.optim.SGD, fused=True), "leave fused=True out"),
        (lambda: torch.tensor([parameter.detach().norm()]), "torch.nn.utils.get_total_norm takes DTensors"),
        (lambda: output.backward(torch.ones(output.shape)), "distribute_tensor(gradient, output.device_mesh"),
        (scaled_between_micro_batches, "moves gradients in every N-th backward"),
        (clipped_between_micro_batches, "where sync_gradients is true"),
        (rows_of_all, "autopar.own_rows(model, output) has those of this rank"),
    )
    missing = []
    for mistake, words in mistakes:
        try:
            mistake()
        except (RuntimeError, NotImplementedError, AttributeError, AssertionError, ValueError) as error:
            advice = advice_for(error)
            if words not in advice:
                missing.append([words, advice, str(error)])
        else:
            missing.append([words, "no error"])
    return missing
